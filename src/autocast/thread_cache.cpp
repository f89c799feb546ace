#include "autocast/thread_cache.h"

#include "autocast/activation_ring.h"
#include "autocast/cast_cache.h"
#include "autocast/cast_plans.h"
#include "autocast/execution_context.h"
#include "autocast/kept_cast_store.h"
#include "autocast/tensor_identity.h"
#include "autocast/torch_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <optional>

// Whose cast is kept, and until when. Casts live until the outermost region of the thread ends.
namespace fastamp::autocast {
namespace {

struct ThreadCache {
  CastCache casts;
  CastPlans plans;
  /// Open regions of ours, counted from one that was the outermost of the thread. While there are
  /// any, the end of the last will be told.
  int our_regions = 0;
  ActivationRing activations;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> region_marker;
};

thread_local ThreadCache t_cache;

void clear_casts() noexcept {
  if (t_cache.plans.is_begun()) {
    t_cache.plans.end(t_cache.casts.used_casts());
  }
  t_cache.casts.clear();
}

bool torch_region_goes_on() {
  return t_cache.region_marker.has_value() && !t_cache.region_marker->expired();
}

/// torch's own autocast class tells nobody that its region ended, but empties torch's weight cache
/// then. A marker left there expires at that moment. (Another thread's torch region empties it too:
/// our casts are dropped early then, which costs time and nothing else.)
bool mark_torch_region() {
  if (torch_region_goes_on()) {
    return true;
  }
  clear_casts();
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  thread_local const at::Tensor leaf = at::zeros({1}, at::kFloat).requires_grad_();
  const at::Tensor marker = leave_in_torch_cache(leaf);
  if (!marker.defined()) {
    return false;
  }
  t_cache.region_marker.emplace(marker.getIntrusivePtr());
  return true;
}

bool can_share(const at::Tensor& activation) {
  return is_weight_cache_enabled() && TensorIdentity::exists_for(activation) &&
         activation.is_non_overlapping_and_dense();
}

bool end_of_region_is_known() {
  return t_cache.our_regions > 0 || (region_depth() > 0 && mark_torch_region());
}

}  // namespace

const at::Tensor* find_weight_cast(const at::Tensor& source, c10::ScalarType to) {
  if (t_cache.casts.empty() || !is_weight_cache_enabled()) {
    return nullptr;
  }
  if (t_cache.our_regions == 0 && !torch_region_goes_on()) {
    clear_casts();
    return nullptr;
  }
  return t_cache.casts.find(source, to);
}

void keep_weight_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast,
                      bool used) {
  if (is_weight_cache_enabled() && TensorIdentity::exists_for(source) &&
      TensorIdentity::exists_for(cast) && !is_cached_by_torch(source) && end_of_region_is_known()) {
    t_cache.casts.insert(source, to, cast, used);
  }
}

std::vector<at::Tensor> begin_planned_region(const at::Tensor& weight, c10::ScalarType to) {
  if (!is_weight_cache_enabled() || is_cached_by_torch(weight) || !end_of_region_is_known()) {
    return {};
  }
  return t_cache.plans.begin(weight, to);
}

at::Tensor find_activation_cast(const at::Tensor& source, c10::ScalarType to) {
  return can_share(source) ? t_cache.activations.find(source, to) : at::Tensor();
}

void keep_activation_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
  if (can_share(source) && TensorIdentity::exists_for(cast)) {
    t_cache.activations.insert(source, to, cast);
  }
}

void on_region_entered(int open_regions) {
  if (open_regions == 1) {
    clear_thread_cache();
    t_cache.our_regions = 1;
  } else if (t_cache.our_regions > 0) {
    ++t_cache.our_regions;
  }
}

void on_region_left(int open_regions) noexcept {
  const bool is_last_of_ours = t_cache.our_regions == 1;
  if (t_cache.our_regions > 0) {
    --t_cache.our_regions;
  }
  if (open_regions == 0 || is_last_of_ours) {
    t_cache.our_regions = 0;
    clear_thread_cache();
    if (KeptCastStore::instance().is_used()) {
      KeptCastStore::instance().sweep_sometimes();
    }
  }
}

void clear_thread_cache() noexcept {
  clear_casts();
  t_cache.activations.clear();
}

}  // namespace fastamp::autocast
