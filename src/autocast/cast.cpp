#include "autocast/cast.h"

#include "autocast/cache/kept_casts.h"
#include "autocast/cache/thread_cache.h"
#include "autocast/cast_together.h"
#include "autocast/make/cast_node.h"
#include "autocast/make/data_cast.h"
#include "autocast/make/plain.h"
#include "autocast/make/weight_view.h"
#include "autocast/trace/tracing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace fastamp::autocast {
namespace {

/// torch's rule for what is worth keeping: a float32 parameter.
bool is_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.requires_grad() && tensor.is_leaf() &&
         !tensor.is_view() && !tensor.is_inference();
}

at::Tensor cast_ordinarily(const at::Tensor& tensor, c10::ScalarType to) {
  if (!is_plain(tensor)) {
    return at::_ops::to_dtype::call(tensor, to, /*non_blocking=*/false, /*copy=*/false,
                                    std::nullopt);
  }
  at::Tensor out = cast_data(tensor, to);
  if (is_recorded(tensor)) {
    record_cast(tensor, out);
  }
  return out;
}

/// How the cast of a weight for an op that runs now is put into the cache.
CastUse use_of(const at::Tensor& weight) {
  if (c10::InferenceMode::is_enabled() && is_plain(weight)) {
    return CastUse::as_data;  // torch keeps nothing there: its later cast is the first.
  }
  return c10::GradMode::is_enabled() || !is_plain(weight) ? CastUse::by_op
                                                          : CastUse::by_op_unrecorded;
}

at::Tensor cast_and_keep(const at::Tensor& weight, c10::ScalarType to, CastUse use) {
  if (is_casting_together()) [[unlikely]] {
    at::Tensor together = cast_with_others(weight, to, use);
    if (together.defined()) {
      return together;
    }
  }
  at::Tensor out = cast_ordinarily(weight, to);
  note_cast(CastEvent::weight_cast, out);
  keep_weight_cast(weight, to, out, use);
  return out;
}

at::Tensor cast_weight(const at::Tensor& weight, c10::ScalarType to) {
  const CastUse use = use_of(weight);
  if (c10::InferenceMode::is_enabled()) {
    // An inference tensor has no version to tell whether it was edited, and is of no use once the
    // mode is left.
    const c10::InferenceMode normal_mode(false);
    const at::NoGradGuard no_grad;
    return cast_and_keep(weight, to, use);
  }
  return cast_and_keep(weight, to, use);
}

at::Tensor cast_kept_weight(const at::Tensor& weight, c10::ScalarType to) {
  at::Tensor out = find_or_make_kept_cast(weight, to);
  if (is_recorded(weight)) {
    record_cast(weight, out);
  }
  keep_weight_cast(weight, to, out, use_of(weight));
  return out;
}

/// The cast of a weight's data, which later ops of the region find, too.
at::Tensor cast_weight_data(const at::Tensor& weight, c10::ScalarType to) {
  at::Tensor kept = find_weight_data(weight, to);
  if (kept.defined()) {
    note_cast(CastEvent::cache_hit, kept);
    return kept;
  }
  const at::NoGradGuard no_grad;
  at::Tensor out;
  if (is_kept_weight(weight)) {
    out = find_or_make_kept_cast(weight, to);
  } else {
    out = cast_data(weight, to);
    note_cast(CastEvent::weight_cast, out);
  }
  keep_weight_cast(weight, to, out, CastUse::as_data);
  return out;
}

/// The cast of a view of a whole weight, such as `weight.t()`: over the memory of the weight's own
/// cast, with a history of its own that goes through the view, so that gradients are summed as if
/// it had been cast by itself. Undefined if it is no such view. LibTorch's Linear works on one.
at::Tensor cast_weight_view(const at::Tensor& view, c10::ScalarType to) {
  const at::Tensor* weight = base_of_whole_view(view);
  if (weight == nullptr || !(is_kept_weight(*weight) || is_weight(*weight))) {
    return {};
  }
  std::optional<c10::InferenceMode> normal_mode;  // As in cast_weight.
  if (c10::InferenceMode::is_enabled()) [[unlikely]] {
    normal_mode.emplace(false);
  }
  const at::Tensor data = cast_weight_data(*weight, to);
  at::Tensor out =
      make_alias(data.storage(), view, to, data.unsafeGetTensorImpl()->version_counter());
  if (is_recorded(view)) {
    record_cast(view, out);
  }
  return out;
}

at::Tensor cast_activation(const at::Tensor& activation, c10::ScalarType to) {
  at::Tensor out = find_activation_cast(activation, to);
  if (out.defined()) {
    note_cast(CastEvent::activation_hit, out);
  } else {
    out = cast_data(activation, to);
    note_cast(CastEvent::other_cast, out);
    keep_activation_cast(activation, to, out);
  }
  record_cast(activation, out);
  return out;
}

}  // namespace

at::Tensor cast(const at::Tensor& tensor, c10::ScalarType to, c10::ScalarType lower, bool share) {
  if (to == lower) {
    // Looked up before asking whether it is a weight at all: a hit answers that, and hits are the
    // common case.
    at::Tensor kept = find_weight_cast(tensor, to);
    if (kept.defined()) {
      note_cast(CastEvent::cache_hit, kept);
      return kept;
    }
  }
  if (to == lower && is_kept_weight(tensor)) {
    return cast_kept_weight(tensor, to);
  }
  if (to == lower && is_weight(tensor) && may_be_kept(tensor)) {
    return cast_weight(tensor, to);
  }
  if (to == lower && share) {
    at::Tensor out = cast_weight_view(tensor, to);
    if (out.defined()) {
      return out;
    }
  }
  if (share && !tensor.is_leaf() && is_plain(tensor) && is_recorded(tensor)) {
    return cast_activation(tensor, to);
  }
  at::Tensor out = cast_ordinarily(tensor, to);
  if (is_traced()) [[unlikely]] {
    report_cast(is_weight(tensor) ? CastEvent::weight_cast : CastEvent::other_cast, out);
  }
  return out;
}

}  // namespace fastamp::autocast
