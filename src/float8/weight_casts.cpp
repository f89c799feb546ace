// SPDX-License-Identifier: Apache-2.0
#include "float8/weight_casts.h"

#include "autocast/cast_source.h"
#include "autocast/cast_together.h"
#include "autocast/kept_casts.h"
#include "autocast/tensor_identity.h"
#include "autocast/torch_state.h"
#include "core/interception.h"
#include "float8/decision.h"
#include "float8/float8_cast_cache.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace fastamp::autocast {
namespace {

/// Unlike is_weight(), of any dtype that can be cast to fp8.
bool is_trained(const at::Tensor& tensor) {
  return !tensor.is_view() && !tensor.is_inference() && is_parameter_operand(tensor);
}

/// A frozen weight can be distinguished from any other tensor only if its casts were requested.
bool is_kept(const at::Tensor& tensor, Float8Path path) {
  const auto& store = KeptCastStore::instance();
  return path == Float8Path::kKernels && store.is_used() &&
         is_lasting(tensor, runs_unchanged(tensor, call_path(tensor))) &&
         is_weight_cache_enabled() && store.is_requested(tensor);
}

bool is_parameter(const at::Tensor& tensor, Float8Path path) {
  return is_trained(tensor) || is_kept(tensor, path);
}

/// base_of_whole_view() for a tensor in a trace, whose memory is not known.
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

/// Whether the cast of another weight can be made ahead of its use in the region.
bool can_join(const WeightToCast& other) {
  const at::Tensor& weight = other.weight;
  return float8_path(weight) == Float8Path::kKernels && is_trained(weight) &&
         !is_kept(weight, Float8Path::kKernels) && weight.dim() == 2 && weight.numel() != 0 &&
         is_float8_operand(weight.scalar_type()) && TensorIdentity::exists_for(weight) &&
         !is_excluded_operand(weight);
}

/// The cast that outlives regions, made if there is none with what is wanted. Replacing one that
/// has one layout makes both: training and evaluation may take turns.
Float8Cast kept_cast(const at::Tensor& weight, c10::ScalarType to, Float8Wanted wanted) {
  auto& store = KeptFloat8Casts::instance();
  if (auto found = store.find(weight, to, wanted)) {
    note_float8_cast(CastEvent::kKeptHit, *found);
    return std::move(*found);
  }
  if (store.find(weight, to, {})) {
    wanted = {.rows = true, .columns = true};
  }
  TensorIdentity as_cast(weight);
  Float8Cast cast = cast_to_float8(weight, to, wanted);
  store.insert(weight, {weight, std::move(as_cast), to, cast});
  note_float8_cast(CastEvent::kWeightCast, cast);
  return cast;
}

/// The cast for a region, and with it those of other weights that open requests name.
Float8Cast cast_for_region(const at::Tensor& weight, c10::ScalarType to, Float8Wanted wanted) {
  std::vector<WeightToCast> weights;
  if (is_casting_together() && is_cast_together(weight)) {
    weights = those_cast_together(begin_planned_float8_region(weight, to));
    std::erase_if(weights, [](const WeightToCast& other) { return !can_join(other); });
  }
  weights.push_back({weight, wanted});
  std::vector<Float8CastRequest> requests;
  requests.reserve(weights.size());
  for (const auto& [matrix, layouts] : weights) {
    requests.push_back({matrix, layouts});
  }
  const auto casts = cast_all_to_float8(requests, to);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const bool is_used = i + 1 == weights.size();
    keep_float8_cast(weights[i].weight, to, casts[i], is_used ? wanted : Float8Wanted());
    note_float8_cast(CastEvent::kWeightCast, casts[i]);
  }
  return casts.back();
}

}  // namespace

WeightSource source_of(const at::Tensor& operand, Float8Path path) {
  if (is_parameter(operand, path)) {
    return {&operand, false, is_kept(operand, path)};
  }
  const at::Tensor* base =
      path == Float8Path::kKernels ? base_of_whole_view(operand) : base_in_trace(operand);
  if (base == nullptr || !is_parameter(*base, path) || base->dim() != 2 || operand.dim() != 2) {
    return {};
  }
  const bool is_same =
      base->sym_sizes() == operand.sym_sizes() && base->sym_strides() == operand.sym_strides();
  const bool is_transposed =
      base->sym_size(0) == operand.sym_size(1) && base->sym_size(1) == operand.sym_size(0) &&
      base->sym_stride(0) == operand.sym_stride(1) && base->sym_stride(1) == operand.sym_stride(0);
  return is_same || is_transposed ? WeightSource{base, !is_same, is_kept(*base, path)}
                                  : WeightSource{};
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

Float8Cast cast_parameter(const WeightSource& source, c10::ScalarType to, Float8Wanted wanted) {
  const at::Tensor& weight = *source.weight;
  if (auto found = find_float8_cast(weight, to, wanted)) {
    note_float8_cast(CastEvent::kCacheHit, *found);
    return std::move(*found);
  }
  // An inference tensor could not be saved for backward once the mode is left, in the same region.
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return source.is_kept ? kept_cast(weight, to, wanted) : cast_for_region(weight, to, wanted);
}

}  // namespace fastamp::autocast
