// SPDX-License-Identifier: Apache-2.0
#include "autocast/kernels/float8_linear.h"

#include "autocast/cache/thread_cache.h"
#include "autocast/cast_source.h"
#include "autocast/kernels/float8_path.h"
#include "autocast/make/cast_node.h"
#include "autocast/make/float8_product.h"
#include "autocast/trace/tracing.h"
#include "core/dtypes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace fastamp::autocast {
namespace {

constexpr std::int64_t kMultiple = 16;

/// Which parameter an operand is, if it is one: its cast is kept for the region.
struct WeightSource {
  const at::Tensor* weight = nullptr;
  bool is_transposed = false;  ///< The operand is `weight.t()`.
};

/// Unlike is_weight(), of any dtype that can be cast to fp8.
bool is_trained(const at::Tensor& tensor) {
  return !tensor.is_view() && !tensor.is_inference() && is_parameter_operand(tensor);
}

/// base_of_whole_view() for a tensor in a trace, whose memory there is no telling of.
const at::Tensor* base_in_trace(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (meta == nullptr || !meta->has_bw_view()) {
    return nullptr;
  }
  const at::Tensor& base = meta->get_backward_view().base_;
  const bool has_same_start = base.scalar_type() == tensor.scalar_type() &&
                              base.sym_storage_offset() == tensor.sym_storage_offset();
  return has_same_start ? &base : nullptr;
}

WeightSource source_of(const at::Tensor& operand, Float8Path path) {
  if (is_trained(operand)) {
    return {&operand, false};
  }
  const at::Tensor* base =
      path == Float8Path::kernels ? base_of_whole_view(operand) : base_in_trace(operand);
  if (base == nullptr || !is_trained(*base) || base->dim() != 2 || operand.dim() != 2) {
    return {};
  }
  const bool is_same =
      base->sym_sizes() == operand.sym_sizes() && base->sym_strides() == operand.sym_strides();
  const bool is_transposed =
      base->sym_size(0) == operand.sym_size(1) && base->sym_size(1) == operand.sym_size(0) &&
      base->sym_stride(0) == operand.sym_stride(1) && base->sym_stride(1) == operand.sym_stride(0);
  return is_same || is_transposed ? WeightSource{base, !is_same} : WeightSource{};
}

bool is_castable(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat || is_16_bit(tensor);
}

/// Whether the sizes are those of x times a weight plus a bias.
bool fits(const Float8Operands& operands) {
  const auto& [x, weight, bias, is_transposed] = operands;
  if (weight.dim() != 2 || x.dim() < 1 ||
      x.sym_size(-1) != weight.sym_size(is_transposed ? 0 : 1)) {
    return false;
  }
  return !bias.defined() ||
         (bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(is_transposed ? 1 : 0));
}

/// A question about the operands; a bias that is missing has every property.
template <class Predicate>
bool all_of(const Float8Operands& operands, const Predicate& predicate) {
  return predicate(operands.x) && predicate(operands.weight) &&
         (!operands.bias.defined() || predicate(operands.bias));
}

/// A number of elements that no trace knows counts as some.
bool is_empty(const at::Tensor& tensor) {
  return TORCH_GUARD_OR_FALSE(tensor.sym_numel().sym_eq(0));
}

Float8Outcome outcome_of(PolicyDevice device, const Float8Operands& operands,
                         const WeightSource& source) {
  const auto is_here = [&](const at::Tensor& tensor) {
    return is_on(tensor, device) && tensor.device() == operands.x.device();
  };
  if (!all_of(operands, is_castable)) {
    return Float8Outcome::dtype;
  }
  if (!all_of(operands, is_here) || !fits(operands)) {
    return Float8Outcome::arguments;
  }
  if (source.weight == nullptr && operands.weight_is_transposed) {
    return Float8Outcome::no_weight;
  }
  if (is_excluded_operand(source.weight == nullptr ? operands.weight : *source.weight)) {
    return Float8Outcome::excluded;
  }
  if (is_empty(operands.x) || is_empty(operands.weight)) {
    return Float8Outcome::empty;
  }
  const auto& weight = operands.weight;
  const bool has_shape = weight.sym_size(0) % kMultiple == 0 && weight.sym_size(1) % kMultiple == 0;
  return has_shape ? Float8Outcome::ran : Float8Outcome::shape;
}

void note_float8_cast(CastEvent event, const Float8Cast& cast) {
  if (!is_traced()) {
    return;
  }
  if (TracedCall* call = TracedCall::current()) {
    const auto bytes = [](const at::Tensor& copy) { return copy.defined() ? bytes_of(copy) : 0; };
    call->count(event, bytes(cast.rows) + bytes(cast.columns));
  }
}

Float8Wanted swapped(Float8Wanted wanted) {
  return {.rows = wanted.columns, .columns = wanted.rows};
}

/// The cast of a parameter, kept for the region.
Float8Cast cast_parameter(const at::Tensor& weight, c10::ScalarType to, Float8Wanted wanted) {
  if (auto found = find_float8_cast(weight, to, wanted)) {
    note_float8_cast(CastEvent::cache_hit, *found);
    return std::move(*found);
  }
  // An inference tensor could not be saved for backward once the mode is left, in the same region.
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Float8Cast cast = cast_to_float8(weight, to, wanted);
  keep_float8_cast(weight, to, cast);
  note_float8_cast(CastEvent::weight_cast, cast);
  return cast;
}

/// The cast of the weight as [N, K].
Float8Cast cast_operand(const Float8Operands& operands, const WeightSource& source,
                        c10::ScalarType to, Float8Wanted wanted) {
  const bool is_transposed = operands.weight_is_transposed;
  if (source.weight == nullptr) {
    Float8Cast cast =
        cast_to_float8(is_transposed ? operands.weight.t() : operands.weight, to, wanted);
    note_float8_cast(CastEvent::other_cast, cast);
    return cast;
  }
  if (is_transposed == source.is_transposed) {
    return cast_parameter(*source.weight, to, wanted);
  }
  Float8Cast cast = cast_parameter(*source.weight, to, swapped(wanted));
  std::swap(cast.rows, cast.columns);
  return cast;
}

Float8Path path_of(const Float8Operands& operands) {
  auto path = std::max(float8_path(operands.x), float8_path(operands.weight));
  if (operands.bias.defined()) {
    path = std::max(path, float8_path(operands.bias));
  }
  // A trace of backward is made in the region of forward, where an eager program has left it.
  const bool is_traced_backward = path == Float8Path::aten && !c10::GradMode::is_enabled() &&
                                  torch::autograd::get_current_node() != nullptr;
  return is_traced_backward ? Float8Path::carrier : path;
}

}  // namespace

at::Tensor refuse_float8_arguments() {
  note_float8(Float8Outcome::arguments);
  return {};
}

at::Tensor float8_linear(PolicyDevice device, const Float8Setting& setting, Float8Op op,
                         const Float8Operands& operands) {
  const auto& [x, weight, bias, is_transposed] = operands;
  if (!setting.runs(op)) {
    note_float8(Float8Outcome::op);
    return {};
  }
  const Float8Path path = path_of(operands);
  if (path == Float8Path::carrier) {
    note_float8(Float8Outcome::intercepted);
    return {};
  }
  const WeightSource source = source_of(weight, path);
  const auto outcome = outcome_of(device, operands, source);
  note_float8(outcome);
  if (outcome != Float8Outcome::ran) {
    return {};
  }
  const bool saves_x = is_recorded(weight);
  const bool saves_weight = is_recorded(x);
  const bool recorded = saves_x || saves_weight || (bias.defined() && is_recorded(bias));
  // In a trace, backward transposes what is used: what a program without it needs not is not asked.
  const bool transposes = path == Float8Path::kernels;
  const Float8Wanted of_x{.rows = true, .columns = saves_x && transposes};
  const Float8Wanted of_weight{.rows = true, .columns = saves_weight && transposes};
  Float8Cast x_cast;
  Float8Cast weight_cast;
  at::Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    x_cast = cast_to_float8(as_matrix(x), setting.forward_dtype, of_x);
    note_float8_cast(CastEvent::other_cast, x_cast);
    // Casts that a trace records belong to it alone.
    const WeightSource keeps = path == Float8Path::kernels ? source : WeightSource();
    weight_cast = cast_operand(operands, keeps, setting.forward_dtype, of_weight);
    auto sizes = x.sym_sizes().vec();
    sizes.back() = weight.sym_size(is_transposed ? 1 : 0);
    y = float8_product(rows_of(x_cast), rows_of(weight_cast),
                       bias.defined() ? std::optional(bias.to(setting.carrier)) : std::nullopt,
                       setting.carrier, setting.fast_accumulate[0])
            .reshape_symint(sizes);
  }
  if (recorded) {
    record_float8_product(operands, setting, saves_x ? x_cast : Float8Cast(),
                          saves_weight ? weight_cast : Float8Cast(), y);
  }
  return y;
}

}  // namespace fastamp::autocast
