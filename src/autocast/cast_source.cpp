// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_source.h"

#include "autocast/cast_node.h"
#include "autocast/kept_casts.h"
#include "autocast/tensor_identity.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

namespace fastamp::autocast {
namespace {

/// Whether the cast of a tensor of any kind (nested, sparse, functional, a subclass) may be cached,
/// if it turns out to be usable: no tracer intercepts all ops, which has to see each cast.
bool may_be_cached(const at::Tensor& tensor, CallPath path) {
  // What wraps this very tensor also wraps its cast, for as long as both live. Functionalization
  // wraps the cast of a functional tensor, but of no other.
  constexpr c10::DispatchKeySet kFollowsItsArgument(c10::DispatchKey::Functionalize);
  return path != CallPath::kIntercepted ||
         !is_intercepted_except(tensor.key_set() | kFollowsItsArgument | kModesAndTransforms);
}

/// Whether the cast of the base serves the view: it is made directly, or a tool of fastamp looks at
/// the program, which must see the memory shared as it is without it. Other modes see each cast
/// that torch would make.
bool is_ordinary_base(const at::Tensor& base) {
  return can_bypass_dispatcher(base) || (is_traced() && is_seen_by_modes_alone(base));
}

const at::Tensor* base_of_whole_view_if(const at::Tensor& tensor,
                                        bool (*is_wanted)(const at::Tensor& base)) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (meta == nullptr || !meta->has_bw_view()) {
    return nullptr;
  }
  const at::Tensor& base = meta->get_backward_view().base_;
  const bool same_elements =
      base.scalar_type() == tensor.scalar_type() && is_wanted(base) &&
      tensor.is_non_overlapping_and_dense() && base.is_non_overlapping_and_dense() &&
      base.numel() == tensor.numel() && base.storage_offset() == tensor.storage_offset() &&
      base.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
  return same_elements ? &base : nullptr;
}

/// Fills in what a cast that the region may keep depends on.
void classify_weight(CastSource& source, CastStore store, bool cache_enabled) {
  const bool is_direct = source.path == CallPath::kDirect;
  const bool is_kept = store == CastStore::kKept;
  const bool has_grad_mode = c10::GradMode::is_enabled();
  source.store = store;
  source.in_inference = c10::InferenceMode::is_enabled();
  source.if_made = CastEvent::kWeightCast;
  source.region_keeps = is_kept || (cache_enabled && is_keepable(*source.data));
  if (source.is_view()) {
    return;
  }
  if (source.in_inference && is_direct) {
    source.use = CastUse::kAsData;  // torch caches nothing there: its first cast comes later.
  } else {
    source.use = has_grad_mode || !is_direct ? CastUse::kByOp : CastUse::kByOpUnrecorded;
  }
  if (cache_enabled && !has_grad_mode && !source.in_inference && source.tensor.requires_grad() &&
      weights_always_require_grad()) {
    source.history = is_kept || is_direct ? CastHistory::kAlone : CastHistory::kByTorch;
  }
}

/// Whether other ops of the region may share the memory of the cast of an activation.
bool is_sharable(const at::Tensor& activation) {
  return TensorIdentity::exists_for(activation) && activation.is_non_overlapping_and_dense();
}

}  // namespace

bool is_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.requires_grad() && tensor.is_leaf() &&
         !tensor.is_view() && !tensor.is_inference();
}

const at::Tensor* base_of_whole_view(const at::Tensor& tensor) {
  return base_of_whole_view_if(tensor, can_bypass_dispatcher);
}

CastSource classify(const at::Tensor& tensor, CastRules rules) {
  CastSource source{.tensor = tensor, .data = &tensor, .path = call_path(tensor)};
  const bool is_recorded_now = is_recorded(tensor);
  const bool is_unchanged = runs_unchanged(tensor, source.path);
  source.history = is_recorded_now ? CastHistory::kRecorded : CastHistory::kNone;
  if (rules.cache_enabled && is_kept_weight(tensor, is_unchanged)) {
    classify_weight(source, CastStore::kKept, rules.cache_enabled);
    return source;
  }
  if (is_weight(tensor)) {
    source.if_made = CastEvent::kWeightCast;
    if (rules.lowers && may_be_cached(tensor, source.path)) {
      classify_weight(source, CastStore::kRegion, rules.cache_enabled);
      return source;
    }
  }
  if (!rules.lowers || !rules.shares ||
      (source.path != CallPath::kDirect && !(is_unchanged && is_traced()))) {
    return source;
  }
  if (const at::Tensor* base = base_of_whole_view_if(tensor, is_ordinary_base)) {
    const bool is_kept = rules.cache_enabled && is_kept_weight(*base, /*runs_unchanged=*/true);
    if (is_kept || is_weight(*base)) {
      source.data = base;
      classify_weight(source, is_kept ? CastStore::kKept : CastStore::kRegion, rules.cache_enabled);
      return source;
    }
  }
  if (rules.cache_enabled && is_recorded_now && !tensor.is_leaf() && is_sharable(tensor)) {
    source.store = CastStore::kRecent;
  }
  return source;
}

}  // namespace fastamp::autocast
