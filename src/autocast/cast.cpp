// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast.h"

#include "autocast/cast_node.h"
#include "autocast/cast_source.h"
#include "autocast/cast_together.h"
#include "autocast/data_cast.h"
#include "autocast/kept_casts.h"
#include "autocast/tensor_identity.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"
#include "core/interception.h"
#include "trace/events.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/InferenceMode.h>

#include <optional>
#include <utility>

namespace fastamp::autocast {
namespace {

/// A cast as a store has it, as it is made, and as the op gets it.
struct Cast {
  at::Tensor tensor;  ///< Undefined if a store has none.
  CastEvent event = CastEvent::kOtherCast;
  bool has_history = false;
  bool was_wrapped = false;  ///< As it was made, by a mode or a subclass: it is the op's alone.
};

/// The modes in which casts that others may use are made and looked for.
class ModesOfCast {
 public:
  explicit ModesOfCast(const CastSource& source) {
    if (source.in_inference) {
      // An inference tensor has no version to show whether it was edited, and is of no use once the
      // mode is left.
      normal_mode_.emplace(false);
      grad_mode_.emplace(false);
    } else if (source.history == CastHistory::kByTorch) {
      grad_mode_.emplace(true);
    }
  }

 private:
  std::optional<c10::InferenceMode> normal_mode_;
  std::optional<c10::AutoGradMode> grad_mode_;
};

at::Tensor call_to(const at::Tensor& tensor, c10::ScalarType to) {
  return at::_ops::to_dtype::call(tensor, to, /*non_blocking=*/false, /*copy=*/false, std::nullopt);
}

/// Looks for the cast in the stores. (For that of a weight itself the region's was asked before.)
Cast find_cast(const CastSource& source, c10::ScalarType to) {
  const at::Tensor& data = *source.data;
  Cast found;
  if (source.store == CastStore::kRecent) {
    return {.tensor = find_recent_cast(data, to), .event = CastEvent::kActivationHit};
  }
  if (source.is_view() && source.region_keeps) {
    found = {.tensor = find_weight_cast(data, to, CastUse::kAsData), .event = CastEvent::kCacheHit};
  }
  if (source.store == CastStore::kKept && !found.tensor.defined()) {
    found = {.tensor = KeptCastStore::instance().find(data, to), .event = CastEvent::kKeptHit};
  }
  return found;
}

/// Makes the cast that no store has. One that outlives the region goes into its store as it is.
Cast make_cast(const CastSource& source, c10::ScalarType to) {
  const at::Tensor& data = *source.data;
  if (source.store == CastStore::kKept) {
    TensorIdentity as_cast(data);
    at::Tensor made = cast_without_history(data, to, source.path);
    const bool wrapped = was_wrapped(made, data);
    if (!wrapped) {
      KeptCastStore::instance().keep(data, std::move(as_cast), to, made);
      made = make_alias(made);
    }
    return {.tensor = std::move(made), .event = source.if_made, .was_wrapped = wrapped};
  }
  if (source.is_view()) {
    at::Tensor made = cast_without_history(data, to, source.path);
    const bool wrapped = was_wrapped(made, data);
    return {.tensor = std::move(made), .event = source.if_made, .was_wrapped = wrapped};
  }
  if (source.path != CallPath::kDirect) {
    return {.tensor = call_to(data, to), .event = source.if_made, .has_history = true};
  }
  at::Tensor made;
  if (source.store == CastStore::kRegion && is_casting_together()) [[unlikely]] {
    made = cast_with_others(source, to);
  }
  return {.tensor = made.defined() ? std::move(made) : cast_data(data, to),
          .event = source.if_made};
}

/// Whether later ops may use a cast that a mode or a transform has seen: it is of the weight's
/// kind, or a wrapper of functionalization alone, for whose duration torch caches it, too.
bool is_usable_later(const at::Tensor& cast, const CastSource& source) {
  constexpr c10::DispatchKeySet kFunctionalization(c10::DispatchKey::Functionalize);
  return source.path != CallPath::kIntercepted || !was_wrapped(cast, source.tensor) ||
         !is_intercepted_except(source.tensor.key_set() | kFunctionalization);
}

/// Makes what the op gets of a cast, and keeps it for later ops.
///
/// The cast of a view of a whole weight, such as `weight.t()`, lies over the memory of the weight's
/// own, with a history of its own that goes through the view, so that gradients are summed as if it
/// had been cast by itself. LibTorch's Linear works on one.
void finish(const CastSource& source, c10::ScalarType to, bool is_made, Cast& cast) {
  const at::Tensor& tensor = source.tensor;
  if (source.is_view()) {
    if (source.region_keeps && cast.event != CastEvent::kCacheHit) {
      keep_weight_cast(*source.data, to, cast.tensor, source.use);
    }
    cast.tensor = make_alias(cast.tensor.storage(), tensor, to,
                             cast.tensor.unsafeGetTensorImpl()->version_counter());
  }
  if (source.history == CastHistory::kRecorded && !cast.has_history) {
    record_cast(tensor, cast.tensor);
  } else if (source.history == CastHistory::kAlone) {
    // Without a history, which would keep the weight alive: an op with grad mode gives it one.
    require_grad_alone(tensor, cast.tensor);
  }
  if (source.store == CastStore::kRecent) {
    if (is_made) {
      keep_recent_cast(tensor, to, cast.tensor);
    }
  } else if (source.region_keeps && !source.is_view() && is_usable_later(cast.tensor, source)) {
    keep_weight_cast(tensor, to, cast.tensor, source.use);
  }
}

Cast find_or_make_cast(const CastSource& source, c10::ScalarType to);

/// Casts what cannot be shared: a mode made another kind of tensor of the data.
Cast cast_unshared(CastSource source, c10::ScalarType to) {
  if (source.is_view()) {
    return {.tensor = call_to(source.tensor, to), .event = source.if_made, .has_history = true};
  }
  source.store = CastStore::kRegion;
  if (source.history == CastHistory::kAlone) {
    source.history = CastHistory::kByTorch;
  }
  return find_or_make_cast(source, to);
}

/// Takes every cast that is no hit at once its way: find or make, keep, finish.
Cast find_or_make_cast(const CastSource& source, c10::ScalarType to) {
  const ModesOfCast modes(source);
  Cast cast = find_cast(source, to);
  const bool is_made = !cast.tensor.defined();
  if (is_made) {
    cast = make_cast(source, to);
    if (cast.was_wrapped) [[unlikely]] {
      return cast_unshared(source, to);
    }
  }
  finish(source, to, is_made, cast);
  return cast;
}

}  // namespace

at::Tensor cast(const at::Tensor& tensor, c10::ScalarType to, c10::ScalarType lower, bool share) {
  const bool lowers = to == lower;
  const bool cache_enabled = lowers && is_weight_cache_enabled();
  Cast cast;
  if (cache_enabled) {
    // Looked up before asking whether it is a weight at all: a hit answers that, and hits are the
    // common case.
    cast = {.tensor = find_weight_cast(tensor, to, CastUse::kByOp), .event = CastEvent::kCacheHit};
  }
  if (!cast.tensor.defined()) {
    cast = find_or_make_cast(classify(tensor, {lowers, cache_enabled, share}), to);
  }
  note_cast(cast.event, cast.tensor);
  return std::move(cast.tensor);
}

}  // namespace fastamp::autocast
