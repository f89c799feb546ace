#include "autocast/kept_cast.h"

#include "autocast/alias.h"
#include "autocast/data_cast.h"
#include "autocast/execution_context.h"
#include "autocast/plain.h"
#include "autocast/tensor_identity.h"
#include "autocast/torch_state.h"
#include "autocast/tracing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/InferenceMode.h>

#include <optional>
#include <utility>

namespace fastamp::autocast {
namespace {

at::Tensor cast_without_history(const at::Tensor& weight, c10::ScalarType to) {
  if (is_plain(weight)) {
    return cast_data(weight, to);
  }
  const at::NoGradGuard no_grad;
  return at::_ops::to_dtype::call(weight, to, /*non_blocking=*/false, /*copy=*/false, std::nullopt);
}

at::Tensor find_or_make(const at::Tensor& weight, c10::ScalarType to) {
  auto& store = KeptCastStore::instance();
  at::Tensor kept = store.find(weight, to);
  if (kept.defined()) {
    note_cast(CastEvent::kept_hit, kept);
    return kept;
  }
  TensorIdentity as_cast(weight);
  const at::Tensor made = cast_without_history(weight, to);
  note_cast(CastEvent::weight_cast, made);
  store.insert(weight, std::move(as_cast), to, made);
  return make_alias(made);
}

}  // namespace

bool is_captured(const at::Tensor& tensor) {
  return !tensor.is_cpu() && execution_context(tensor.device()).graph_capture != 0;
}

bool can_be_kept(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.is_leaf() && is_ordinary(tensor) &&
         !tensor.is_inference() && !tensor.is_view() && TensorIdentity::exists_for(tensor) &&
         tensor.is_non_overlapping_and_dense() && !is_captured(tensor);
}

bool is_kept_weight_slow(const at::Tensor& tensor) {
  return can_be_kept(tensor) && is_weight_cache_enabled() && !is_cached_by_torch(tensor) &&
         KeptCastStore::instance().is_wanted(tensor);
}

at::Tensor make_kept_cast(const at::Tensor& weight, c10::ScalarType to) {
  if (c10::InferenceMode::is_enabled()) {
    // As in cast_weight: an inference tensor would be of no use to others.
    const c10::InferenceMode normal_mode(false);
    return cast_without_history(weight, to);
  }
  return cast_without_history(weight, to);
}

at::Tensor find_or_make_kept_cast(const at::Tensor& weight, c10::ScalarType to) {
  if (c10::InferenceMode::is_enabled()) {
    const c10::InferenceMode normal_mode(false);  // For aliases, too.
    return find_or_make(weight, to);
  }
  return find_or_make(weight, to);
}

}  // namespace fastamp::autocast
