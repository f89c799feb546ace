// SPDX-License-Identifier: Apache-2.0
// The ops that a recipe runs in fp8. Each is brought into one form, x times a weight, plus a bias.
#include "float8/linear.h"

#include "autocast/cast_node.h"
#include "autocast/cast_source.h"
#include "autocast/float8_interface.h"
#include "core/dtypes.h"
#include "core/interception.h"
#include "float8/decision.h"
#include "float8/float8_cast_cache.h"
#include "float8/linear_backward.h"
#include "float8/plan.h"
#include "float8/product.h"
#include "float8/recipe.h"
#include "float8/weight_casts.h"
#include "trace/events.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

namespace fastamp::autocast {
namespace {

/// Whether a call with the tensor would be intercepted if it were not for a plan: its tensors are
/// fake, and a mode makes their results.
bool is_intercepted_in_plan(const at::Tensor& tensor) {
  const auto keys = tensor.key_set() - c10::python_ks;
  return keys.has_any(detail::kInterceptors) || !keys.has(c10::DispatchKey::Dense) ||
         is_intercepted_except(c10::python_ks);
}

bool is_castable(const at::Tensor& tensor) { return is_float8_operand(tensor.scalar_type()); }

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

/// A trace need not know the number of rows: then there are some.
Float8Shape shape_of(const Float8Operands& operands) {
  const auto& [x, weight, bias, is_transposed] = operands;
  const auto k = x.sym_size(-1).guard_int(__FILE__, __LINE__);
  return {.m = k == 0 ? 0 : x.sym_numel().maybe_as_int().value_or(k) / k,
          .k = k,
          .n = weight.sym_size(is_transposed ? 1 : 0).guard_int(__FILE__, __LINE__),
          .x_dtype = x.scalar_type(),
          .weight_dtype = weight.scalar_type()};
}

Float8Outcome outcome_of(PolicyDevice device, const Float8Setting& setting, Float8Op op,
                         const Float8Operands& operands, Float8Path path,
                         const WeightSource& source) {
  if (!setting.runs(op)) {
    return Float8Outcome::kOp;
  }
  if (path == Float8Path::kBaseDtype) {
    return Float8Outcome::kIntercepted;
  }
  const auto is_here = [&](const at::Tensor& tensor) {
    return is_on(tensor, device) && tensor.device() == operands.x.device();
  };
  if (!all_of(operands, is_castable)) {
    return Float8Outcome::kDtype;
  }
  if (!all_of(operands, is_here) || !fits(operands)) {
    return Float8Outcome::kArguments;
  }
  if (source.weight == nullptr && operands.weight_is_transposed) {
    return Float8Outcome::kNoWeight;
  }
  if (is_excluded_operand(source.weight == nullptr ? operands.weight : *source.weight)) {
    return Float8Outcome::kExcluded;
  }
  return float8_outcome(shape_of(operands), setting, device_type(device));
}

/// The call as a plan records it.
void add_to_plan(Float8Calls& calls, Float8Outcome outcome, const Float8Setting& setting,
                 Float8Op op, const Float8Operands& operands, Float8Path path,
                 const WeightSource& source) {
  const at::Tensor& weight = source.weight == nullptr ? operands.weight : *source.weight;
  if (path == Float8Path::kBaseDtype || !fits(operands)) {
    calls.add(op, outcome, weight);
    return;
  }
  auto shape = shape_of(operands);
  shape.x_gradient = is_recorded(operands.x);
  shape.weight_gradient = is_recorded(weight);
  calls.add(op, outcome, setting.base_dtype, operands.x, weight, shape);
}

/// The cast of x as a matrix of rows. Products of one activation in a row share it.
Float8Cast cast_x(const at::Tensor& x, Float8Path path, c10::ScalarType to, Float8Wanted wanted) {
  const bool is_shared = path == Float8Path::kKernels && !x.is_leaf() && is_recorded(x);
  if (is_shared) {
    if (auto found = find_float8_activation(x, to, wanted)) {
      note_float8_cast(CastEvent::kActivationHit, *found);
      return std::move(*found);
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Float8Cast cast = cast_to_float8(as_matrix(x), to, wanted);
  note_float8_cast(CastEvent::kOtherCast, cast);
  if (is_shared) {
    keep_float8_activation(x, to, cast);
  }
  return cast;
}

/// The cast of the weight as [N, K].
Float8Cast cast_operand(const Float8Operands& operands, const WeightSource& source,
                        c10::ScalarType to, Float8Wanted wanted) {
  const bool is_transposed = operands.weight_is_transposed;
  if (source.weight == nullptr) {
    Float8Cast cast =
        cast_to_float8(is_transposed ? operands.weight.t() : operands.weight, to, wanted);
    note_float8_cast(CastEvent::kOtherCast, cast);
    return cast;
  }
  if (is_transposed == source.is_transposed) {
    return cast_parameter(source, to, wanted);
  }
  Float8Cast cast = cast_parameter(source, to, wanted.transposed());
  std::swap(cast.rows, cast.columns);
  return cast;
}

Float8Path path_in_plan(const Float8Operands& operands) {
  const bool is_plain =
      all_of(operands, [](const at::Tensor& tensor) { return !is_intercepted_in_plan(tensor); });
  return is_plain ? Float8Path::kAten : Float8Path::kBaseDtype;
}

Float8Path path_of(const Float8Operands& operands) {
  auto path = std::max(float8_path(operands.x), float8_path(operands.weight));
  if (operands.bias.defined()) {
    path = std::max(path, float8_path(operands.bias));
  }
  // A trace of backward is made in the region of forward, where an eager program has left it.
  const bool is_traced_backward = path == Float8Path::kAten && !c10::GradMode::is_enabled() &&
                                  torch::autograd::get_current_node() != nullptr;
  return is_traced_backward ? Float8Path::kBaseDtype : path;
}

/// The cast of x, alone or with the scale of the tensor that it is a part of.
Float8Cast cast_x_or_part(const at::Tensor& x, Float8Path path, c10::ScalarType to,
                          Float8Wanted wanted, const at::Tensor& amax) {
  if (!amax.defined()) {
    return cast_x(x, path, to, wanted);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Float8Cast cast = cast_part_to_float8(as_matrix(x), amax, to, wanted);
  note_float8_cast(CastEvent::kOtherCast, cast);
  return cast;
}

/// The cast of the weight as [N, K]: as it came, or made here.
Float8Cast cast_weight_or_part(const Float8Operands& operands, const WeightSource& source,
                               c10::ScalarType to, Float8Wanted wanted, const Float8Parts& parts) {
  if (parts.weight.rows.defined()) {
    return parts.weight;
  }
  if (!parts.weight_amax.defined()) {
    return cast_operand(operands, source, to, wanted);
  }
  Float8Cast cast = cast_part_to_float8(operands.weight, parts.weight_amax, to, wanted);
  note_float8_cast(CastEvent::kOtherCast, cast);
  return cast;
}

/// Casts, multiplies and records.
at::Tensor run_product(const Float8Setting& setting, const Float8Operands& operands,
                       const WeightSource& source, Float8Path path, const Float8Parts& parts = {}) {
  const auto& [x, weight, bias, is_transposed] = operands;
  const bool saves_x = is_recorded(weight);
  const bool saves_weight = is_recorded(x);
  const bool recorded = saves_x || saves_weight || (bias.defined() && is_recorded(bias));
  // In a trace, backward transposes what is used: what a program without it needs not is not asked.
  const bool transposes = path == Float8Path::kKernels;
  const Float8Wanted of_x{.rows = true, .columns = saves_x && transposes};
  const Float8Wanted of_weight{.rows = true, .columns = saves_weight && transposes};
  // Casts that outlive the call are of plain tensors.
  const WeightSource keeps = path == Float8Path::kKernels ? source : WeightSource();
  Float8Cast x_cast = cast_x_or_part(x, path, setting.forward_dtype, of_x, parts.x_amax);
  Float8Cast weight_cast;
  at::Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    weight_cast = cast_weight_or_part(operands, keeps, setting.forward_dtype, of_weight, parts);
    auto sizes = x.sym_sizes().vec();
    sizes.back() = weight.sym_size(is_transposed ? 1 : 0);
    const bool adds_bias = bias.defined() && parts.adds_bias;
    y = float8_product(rows_of(x_cast), rows_of(weight_cast),
                       adds_bias ? std::optional(bias.to(setting.base_dtype)) : std::nullopt,
                       setting.base_dtype, setting.fast_accumulate[0])
            .reshape_symint(sizes);
  }
  if (recorded) {
    // Casts that are shared may have what another use did need.
    if (!of_x.columns) {
      x_cast.columns = at::Tensor();
    }
    if (!of_weight.columns) {
      weight_cast.columns = at::Tensor();
    }
    record_float8_product(operands, setting, saves_x ? x_cast : Float8Cast(),
                          saves_weight ? weight_cast : Float8Cast(), y, parts.agree);
  }
  return y;
}

std::atomic<const LinearOfParts*> g_linear_of_parts{nullptr};

/// Returns Python's functions if they may run the product on each rank's part, else null.
const LinearOfParts* of_parts(Float8Op op, const Float8Operands& operands) {
  const auto* functions = g_linear_of_parts.load(std::memory_order_acquire);
  const bool is_part = op == Float8Op::linear && functions != nullptr &&
                       operands.weight.key_set().has(c10::DispatchKey::Python) &&
                       !is_intercepted() && functions->is_part(operands.weight);
  return is_part ? functions : nullptr;
}

/// Runs each rank's part; decided by the sizes of the whole, so that ranks agree.
at::Tensor run_parts(const LinearOfParts& functions, PolicyDevice device,
                     const Float8Setting& setting, Float8Op op, const Float8Operands& operands) {
  auto outcome = outcome_of(device, setting, op, operands, Float8Path::kAten, {});
  at::Tensor y;
  if (outcome == Float8Outcome::kRan) {
    y = functions.run(setting, operands.x, operands.weight, operands.bias);
    outcome = y.defined() ? outcome : Float8Outcome::kIntercepted;
  }
  note_float8(outcome);
  return y;
}

/// Handles an op that computes something else with these arguments than x times a weight.
at::Tensor refuse_float8_arguments(Float8Op op) {
  note_float8(Float8Outcome::kArguments);
  if (auto* const calls = Float8Calls::current()) [[unlikely]] {
    calls->add(op, Float8Outcome::kArguments);
  }
  return {};
}

/// The op's result, or an undefined tensor if the product stays in the base dtype.
at::Tensor float8_linear(PolicyDevice device, const Float8Setting& setting, Float8Op op,
                         const Float8Operands& operands) {
  auto* const calls = Float8Calls::current();
  const Float8Path path = calls == nullptr ? path_of(operands) : path_in_plan(operands);
  if (path == Float8Path::kBaseDtype && calls == nullptr) {
    if (const auto* functions = of_parts(op, operands)) {
      return run_parts(*functions, device, setting, op, operands);
    }
  }
  const auto source =
      path == Float8Path::kBaseDtype ? WeightSource() : source_of(operands.weight, path);
  const auto outcome = outcome_of(device, setting, op, operands, path, source);
  note_float8(outcome);
  if (calls != nullptr) [[unlikely]] {
    add_to_plan(*calls, outcome, setting, op, operands, path, source);
    return {};
  }
  return outcome == Float8Outcome::kRan ? run_product(setting, operands, source, path)
                                        : at::Tensor();
}

}  // namespace

at::Tensor float8_linear_of_parts(const Float8Setting& setting, const at::Tensor& x,
                                  const at::Tensor& weight, const at::Tensor& bias,
                                  const Float8Parts& parts) {
  return run_product(setting, {x, weight, bias, false}, {}, Float8Path::kKernels, parts);
}

void set_linear_of_parts(const LinearOfParts* functions) {
  g_linear_of_parts.store(functions, std::memory_order_release);
}

at::Tensor run_in_float8(OpTag<OpId::linear> /*op*/, PolicyDevice device,
                         const Float8Setting& setting, const at::Tensor& x,
                         const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return float8_linear(device, setting, Float8Op::linear,
                       {x, weight, bias.has_value() ? *bias : at::Tensor(), false});
}

at::Tensor run_in_float8(OpTag<OpId::mm> /*op*/, PolicyDevice device, const Float8Setting& setting,
                         const at::Tensor& x, const at::Tensor& weight) {
  return x.dim() == 2 ? float8_linear(device, setting, Float8Op::mm, {x, weight, {}, true})
                      : refuse_float8_arguments(Float8Op::mm);
}

at::Tensor run_in_float8(OpTag<OpId::matmul> /*op*/, PolicyDevice device,
                         const Float8Setting& setting, const at::Tensor& x,
                         const at::Tensor& weight) {
  return float8_linear(device, setting, Float8Op::matmul, {x, weight, {}, true});
}

at::Tensor run_in_float8(OpTag<OpId::addmm> /*op*/, PolicyDevice device,
                         const Float8Setting& setting, const at::Tensor& bias, const at::Tensor& x,
                         const at::Tensor& weight, const c10::Scalar& beta,
                         const c10::Scalar& alpha) {
  const bool is_linear = x.dim() == 2 && beta.equal(1) && alpha.equal(1);
  return is_linear ? float8_linear(device, setting, Float8Op::addmm, {x, weight, bias, true})
                   : refuse_float8_arguments(Float8Op::addmm);
}

}  // namespace fastamp::autocast
