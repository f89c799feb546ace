#include "autocast/activation_ring.h"
#include "autocast/cast_cache.h"
#include "autocast/execution_context.h"
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
  ActivationRing activations;
  bool region_is_ours = false;  ///< The outermost region is one of ours: its end will be told.
  std::optional<WeakTensor> region_marker;
};

thread_local ThreadCache t_cache;

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
  t_cache.casts.clear();
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

bool end_of_region_is_known() {
  return t_cache.region_is_ours || (region_depth() > 0 && mark_torch_region());
}

}  // namespace

const at::Tensor* find_weight_cast(const at::Tensor& source, c10::ScalarType to) {
  if (t_cache.casts.empty() || !is_weight_cache_enabled()) {
    return nullptr;
  }
  if (!t_cache.region_is_ours && !torch_region_goes_on()) {
    t_cache.casts.clear();
    return nullptr;
  }
  return t_cache.casts.find(source, to);
}

void keep_weight_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
  if (is_weight_cache_enabled() && knows_execution_context(source.device().type()) &&
      !is_cached_by_torch(source) && end_of_region_is_known()) {
    t_cache.casts.insert(source, to, cast);
  }
}

at::Tensor find_activation_cast(const at::Tensor& source, c10::ScalarType to) {
  const bool can_tell = is_weight_cache_enabled() && has_identity(source) &&
                        source.is_non_overlapping_and_dense() &&
                        knows_execution_context(source.device().type());
  return can_tell ? t_cache.activations.find(source, to) : at::Tensor();
}

void keep_activation_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
  const bool can_tell = is_weight_cache_enabled() && has_identity(source) && has_identity(cast) &&
                        source.is_non_overlapping_and_dense() &&
                        knows_execution_context(source.device().type());
  if (can_tell) {
    t_cache.activations.insert(source, to, cast);
  }
}

void on_outermost_region_enter() {
  clear_thread_cache();
  t_cache.region_is_ours = true;
}

void on_outermost_region_exit() noexcept {
  t_cache.region_is_ours = false;
  clear_thread_cache();
}

void clear_thread_cache() noexcept {
  t_cache.casts.clear();
  t_cache.activations.clear();
}

}  // namespace fastamp::autocast
