#include "autocast/cast.h"

#include "autocast/cast_node.h"
#include "autocast/cast_together.h"
#include "autocast/data_cast.h"
#include "autocast/kept_cast.h"
#include "autocast/plain.h"
#include "autocast/thread_cache.h"
#include "autocast/tracing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/InferenceMode.h>

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

at::Tensor cast_and_keep(const at::Tensor& weight, c10::ScalarType to) {
  if (is_casting_together()) [[unlikely]] {
    at::Tensor together = cast_with_others(weight, to);
    if (together.defined()) {
      return together;
    }
  }
  at::Tensor out = cast_ordinarily(weight, to);
  note_cast(CastEvent::weight_cast, out);
  keep_weight_cast(weight, to, out);
  return out;
}

at::Tensor cast_weight(const at::Tensor& weight, c10::ScalarType to) {
  if (c10::InferenceMode::is_enabled()) {
    // An inference tensor has no version to tell whether it was edited, and is of no use once the
    // mode is left.
    const c10::InferenceMode normal_mode(false);
    const at::NoGradGuard no_grad;
    return cast_and_keep(weight, to);
  }
  return cast_and_keep(weight, to);
}

at::Tensor cast_kept_weight(const at::Tensor& weight, c10::ScalarType to) {
  at::Tensor out = find_or_make_kept_cast(weight, to);
  if (is_recorded(weight)) {
    record_cast(weight, out);
  }
  keep_weight_cast(weight, to, out);
  return out;
}

at::Tensor cast_activation(const at::Tensor& activation, c10::ScalarType to) {
  at::Tensor out = find_activation_cast(activation, to);
  if (out.defined()) {
    note_cast(CastEvent::ring_hit, out);
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
    if (const at::Tensor* kept = find_weight_cast(tensor, to)) {
      note_cast(CastEvent::cache_hit, *kept);
      return *kept;
    }
  }
  if (to == lower && is_kept_weight(tensor)) {
    return cast_kept_weight(tensor, to);
  }
  if (to == lower && is_weight(tensor) && may_be_kept(tensor)) {
    return cast_weight(tensor, to);
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
