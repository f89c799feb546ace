// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_source.h"

#include "autocast/cache/kept_casts.h"
#include "autocast/make/cast_node.h"
#include "autocast/trace/tracing.h"

#include <torch/csrc/autograd/variable.h>

namespace fastamp::autocast {
namespace {

/// Whether the cast of a tensor of any kind (nested, sparse, functional, a subclass) may be cached,
/// if it turns out to be usable: no tracer intercepts all ops, which has to see each cast.
bool may_be_cached(const at::Tensor& tensor, CallPath path) {
  // What wraps this very tensor also wraps its cast, for as long as both live. Functionalization
  // wraps the cast of a functional tensor, but of no other.
  constexpr c10::DispatchKeySet kFollowsItsArgument(c10::DispatchKey::Functionalize);
  return path != CallPath::intercepted ||
         !is_intercepted_except(tensor.key_set() | kFollowsItsArgument | kModesAndTransforms);
}

/// Whether a tool of ours looks at the program: it must see the memory shared as it is without it,
/// though it sees the ops. Other modes see each cast that torch would make.
bool is_looked_at(const at::Tensor& tensor) {
  return is_traced() && is_seen_by_modes_alone(tensor);
}

/// Whether its base's cast serves the view, as find_weight_data() finds it.
bool is_ordinary_base(const at::Tensor& base) {
  return can_bypass_dispatcher(base) || is_looked_at(base);
}

}  // namespace

const at::Tensor* base_of_whole_view(const at::Tensor& tensor) {
  return base_of_whole_view_if(tensor, can_bypass_dispatcher);
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

bool is_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kFloat && tensor.requires_grad() && tensor.is_leaf() &&
         !tensor.is_view() && !tensor.is_inference();
}

CastSource classify(const at::Tensor& tensor, bool lowers, bool share) {
  CastSource source{.tensor = tensor, .kind = CastKind::other, .path = call_path(tensor)};
  if (lowers && is_kept_weight(tensor, source.path)) {
    source.kind = CastKind::kept_weight;
    return source;
  }
  if (lowers && is_weight(tensor) && may_be_cached(tensor, source.path)) {
    source.kind = CastKind::weight;
    return source;
  }
  if (!share || (source.path != CallPath::direct && !is_looked_at(tensor))) {
    return source;
  }
  if (const at::Tensor* base = lowers ? base_of_whole_view_if(tensor, is_ordinary_base) : nullptr) {
    source.base_is_kept = is_kept_weight(*base, source.path);
    if (source.base_is_kept || is_weight(*base)) {
      source.kind = CastKind::weight_view;
      source.base = base;
      return source;
    }
  }
  if (!tensor.is_leaf() && is_recorded(tensor)) {
    source.kind = CastKind::activation;
  }
  return source;
}

}  // namespace fastamp::autocast
