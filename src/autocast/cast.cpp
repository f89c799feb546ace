// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast.h"

#include "autocast/cache/kept_casts.h"
#include "autocast/cache/thread_cache.h"
#include "autocast/cast_source.h"
#include "autocast/cast_together.h"
#include "autocast/make/cast_node.h"
#include "autocast/make/data_cast.h"
#include "autocast/make/gradient_wrapper.h"
#include "autocast/torch/torch_state.h"
#include "autocast/trace/tracing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace fastamp::autocast {
namespace {

at::Tensor cast_ordinarily(const CastSource& source, c10::ScalarType to) {
  if (source.path != CallPath::direct) {
    return at::_ops::to_dtype::call(source.tensor, to, /*non_blocking=*/false, /*copy=*/false,
                                    std::nullopt);
  }
  at::Tensor out = cast_data(source.tensor, to);
  if (is_recorded(source.tensor)) {
    record_cast(source.tensor, out);
  }
  return out;
}

/// How the cast of a weight for an op that runs now is put into the cache.
CastUse use_of(const CastSource& weight) {
  const bool is_direct = weight.path == CallPath::direct;
  if (c10::InferenceMode::is_enabled() && is_direct) {
    return CastUse::as_data;  // torch caches nothing there: its first cast comes later.
  }
  return c10::GradMode::is_enabled() || !is_direct ? CastUse::by_op : CastUse::by_op_unrecorded;
}

/// Whether grad mode is off and torch's cast of the weight would require a gradient all the same.
bool requires_grad_without_grad_mode(const CastSource& weight) {
  return kWeightsAlwaysRequireGrad && !c10::GradMode::is_enabled() &&
         !c10::InferenceMode::is_enabled() && weight.tensor.requires_grad() &&
         is_weight_cache_enabled();
}

/// Whether later ops may use a cast that a mode or a transform has seen: it is of the weight's
/// kind, or a wrapper of torch.func's gradients, which has the cast of the level below inside, or
/// one of functionalization alone, for whose duration torch caches it, too.
bool is_usable_later(const at::Tensor& cast, const at::Tensor& weight) {
  constexpr c10::DispatchKeySet kFunctionalization(c10::DispatchKey::Functionalize);
  return !was_wrapped(cast, weight) || is_gradient_wrapper(cast) ||
         !is_intercepted_except(weight.key_set() | kFunctionalization);
}

at::Tensor cast_and_keep(const CastSource& weight, c10::ScalarType to, CastUse use) {
  if (is_casting_together()) [[unlikely]] {
    at::Tensor together = cast_with_others(weight, to, use);
    if (together.defined()) {
      return together;
    }
  }
  at::Tensor out = cast_ordinarily(weight, to);
  note_cast(CastEvent::weight_cast, out);
  if (weight.path != CallPath::intercepted || is_usable_later(out, weight.tensor)) {
    keep_weight_cast(weight.tensor, to, out, use);
  }
  return out;
}

at::Tensor cast_weight(const CastSource& weight, c10::ScalarType to) {
  const CastUse use = use_of(weight);
  if (c10::InferenceMode::is_enabled()) {
    // An inference tensor has no version to tell whether it was edited, and is of no use once the
    // mode is left.
    const c10::InferenceMode normal_mode(false);
    const at::NoGradGuard no_grad;
    return cast_and_keep(weight, to, use);
  }
  if (!requires_grad_without_grad_mode(weight)) {
    return cast_and_keep(weight, to, use);
  }
  if (weight.path != CallPath::direct) {
    const c10::AutoGradMode as_torch(true);
    return cast_and_keep(weight, to, use);
  }
  // Without a history, which would keep the weight alive: an op with grad mode gives it one.
  at::Tensor out = cast_and_keep(weight, to, use);
  require_grad_alone(weight.tensor, out);
  return out;
}

at::Tensor cast_kept_weight(const CastSource& weight, c10::ScalarType to) {
  at::Tensor out = find_or_make_kept_cast(weight.tensor, to, weight.path);
  if (!out.defined()) {
    return cast_weight(weight, to);
  }
  if (is_recorded(weight.tensor)) {
    record_cast(weight.tensor, out);
  }
  if (requires_grad_without_grad_mode(weight)) {
    require_grad_alone(weight.tensor, out);
  }
  keep_weight_cast(weight.tensor, to, out, use_of(weight));
  return out;
}

/// The cast of the data of a view's weight, which later ops of the region find, too. Undefined if a
/// mode makes another kind of tensor of it.
at::Tensor cast_base_data(const CastSource& view, c10::ScalarType to) {
  const at::Tensor& weight = *view.base;
  at::Tensor cached = find_weight_data(weight, to);
  if (cached.defined()) {
    note_cast(CastEvent::cache_hit, cached);
    return cached;
  }
  const at::NoGradGuard no_grad;
  at::Tensor out;
  if (view.base_is_kept) {
    out = find_or_make_kept_cast(weight, to, view.path);
  } else {
    out = make_kept_cast(weight, to, view.path);
    note_cast(CastEvent::weight_cast, out);
  }
  if (!out.defined() || was_wrapped(out, weight)) {
    return {};
  }
  keep_weight_cast(weight, to, out, CastUse::as_data);
  return out;
}

/// The cast of a view of a whole weight, such as `weight.t()`: over the memory of the weight's own
/// cast, with a history of its own that goes through the view, so that gradients are summed as if
/// it had been cast by itself. LibTorch's Linear works on one.
at::Tensor cast_weight_view(const CastSource& view, c10::ScalarType to) {
  std::optional<c10::InferenceMode> normal_mode;  // As in cast_weight.
  if (c10::InferenceMode::is_enabled()) [[unlikely]] {
    normal_mode.emplace(false);
  }
  const at::Tensor data = cast_base_data(view, to);
  if (!data.defined()) {
    return cast_ordinarily(view, to);
  }
  at::Tensor out =
      make_alias(data.storage(), view.tensor, to, data.unsafeGetTensorImpl()->version_counter());
  if (is_recorded(view.tensor)) {
    record_cast(view.tensor, out);
  }
  return out;
}

at::Tensor cast_activation(const CastSource& source, c10::ScalarType to) {
  const at::Tensor& activation = source.tensor;
  at::Tensor out = find_activation_cast(activation, to);
  if (out.defined()) {
    note_cast(CastEvent::activation_hit, out);
    record_cast(activation, out);
    return out;
  }
  out = cast_ordinarily(source, to);
  note_cast(CastEvent::other_cast, out);
  keep_activation_cast(activation, to, out);
  return out;
}

at::Tensor cast_other(const CastSource& source, c10::ScalarType to) {
  at::Tensor out = cast_ordinarily(source, to);
  if (is_traced()) [[unlikely]] {
    report_cast(is_weight(source.tensor) ? CastEvent::weight_cast : CastEvent::other_cast, out);
  }
  return out;
}

}  // namespace

at::Tensor cast(const at::Tensor& tensor, c10::ScalarType to, c10::ScalarType lower, bool share) {
  if (to == lower) {
    // Looked up before asking whether it is a weight at all: a hit answers that, and hits are the
    // common case.
    at::Tensor cached = find_weight_cast(tensor, to);
    if (cached.defined()) {
      note_cast(CastEvent::cache_hit, cached);
      return cached;
    }
  }
  const CastSource source = classify(tensor, to == lower, share);
  switch (source.kind) {
    case CastKind::weight:
      return cast_weight(source, to);
    case CastKind::kept_weight:
      return cast_kept_weight(source, to);
    case CastKind::weight_view:
      return cast_weight_view(source, to);
    case CastKind::activation:
      return cast_activation(source, to);
    case CastKind::other:
      break;
  }
  return cast_other(source, to);
}

}  // namespace fastamp::autocast
