// SPDX-License-Identifier: Apache-2.0
#include "autocast/thread_cache.h"

#include "autocast/cast_cache.h"
#include "autocast/cast_plans.h"
#include "autocast/float8_interface.h"
#include "autocast/recent_casts.h"
#include "autocast/tensor_identity.h"
#include "autocast/torch_state.h"
#include "core/interception.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <new>
#include <optional>
#include <utility>

// Whose cast is kept, and until when. Casts live until the outermost region of the thread ends.
namespace fastamp::autocast {

struct ThreadCache {
  CastCache casts;
  CastPlans plans;
  std::shared_ptr<RegionFloat8Casts> float8_casts;  ///< Null before the first one.
  /// Open regions of fastamp, counted from one that was the outermost of the thread. While there
  /// are any, we learn of the end of the last one.
  int own_regions = 0;
  RecentCasts recent;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> region_marker;
  at::Tensor marked_leaf;  ///< The leaf whose cast was left in torch's cache.
};

namespace {

/// Null before the thread's first use of it, and again at the thread's end: a pointer, so that code
/// that runs then (destructors of casts and of other thread-local objects) finds no half-destroyed
/// object.
constinit thread_local ThreadCache* t_cache = nullptr;
constinit thread_local bool t_ends = false;

struct EndOfCache {
  EndOfCache() = default;
  EndOfCache(const EndOfCache&) = delete;
  EndOfCache& operator=(const EndOfCache&) = delete;
  EndOfCache(EndOfCache&&) = delete;
  EndOfCache& operator=(EndOfCache&&) = delete;
  ~EndOfCache() {
    t_ends = true;
    delete std::exchange(t_cache, nullptr);  // NOLINT(cppcoreguidelines-owning-memory)
  }
};

/// Returns this thread's cache, made if there is none; null at the end of the thread.
ThreadCache* make_cache() {
  if (t_cache == nullptr && !t_ends) {
    prepare_to_clear_torch_cache();  // First, so that it outlives the cache.
    thread_local const EndOfCache end;
    t_cache = new ThreadCache;  // NOLINT(cppcoreguidelines-owning-memory)
  }
  return t_cache;
}

void clear_casts(ThreadCache& cache) noexcept {
  if (cache.plans.is_begun()) {
    try {
      cache.plans.end(cache.casts.used_casts());
    } catch (const std::bad_alloc&) {
      cache.plans.end({});  // Without a plan each weight is cast at its first use.
    }
  }
  if (cache.float8_casts != nullptr) {
    clear_float8_casts(*cache.float8_casts);
  }
  cache.casts.clear();  // Last: the end of their history may run code that opens regions.
}

void clear(ThreadCache& cache) noexcept {
  cache.recent.clear();
  clear_casts(cache);
}

bool torch_region_goes_on(const ThreadCache& cache) {
  return cache.region_marker.has_value() && !cache.region_marker->expired();
}

/// torch's own autocast class does not report the end of its region, but empties torch's weight
/// cache then. A marker left there expires at that moment. (Another thread's torch region empties
/// it too: our casts are dropped early then, which costs time and nothing else.)
bool mark_torch_region(ThreadCache& cache) {
  if (torch_region_goes_on(cache)) {
    return true;
  }
  clear_casts(cache);
  // Modes and tracers must not see the marker: a checkpoint counts casts.
  const c10::impl::ExcludeDispatchKeyGuard unseen(fastamp::detail::kInterceptors);
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  if (!cache.marked_leaf.defined()) {
    cache.marked_leaf = at::zeros({1}, at::kFloat).requires_grad_();
  }
  const at::Tensor marker = leave_in_torch_cache(cache.marked_leaf);
  if (!marker.defined()) {
    return false;
  }
  cache.region_marker.emplace(marker.getIntrusivePtr());
  return true;
}

bool end_of_region_is_known(ThreadCache& cache) {
  return cache.own_regions > 0 || (region_depth() > 0 && mark_torch_region(cache));
}

bool holds_casts(const ThreadCache& cache) { return !cache.casts.empty(); }

bool holds_float8_casts(const ThreadCache& cache) {
  return cache.float8_casts != nullptr && !is_empty(*cache.float8_casts);
}

/// Returns this thread's cache, if it holds casts of a kind and their region goes on.
template <bool (*kHolds)(const ThreadCache&)>
ThreadCache* usable_cache() {
  ThreadCache* const cache = t_cache;
  if (cache == nullptr || !kHolds(*cache)) {
    return nullptr;
  }
  if (cache->own_regions == 0 && !torch_region_goes_on(*cache)) {
    clear_casts(*cache);
    return nullptr;
  }
  return cache;
}

/// Whether torch.jit.trace records the ops of this thread. It has to see each cast: one from before
/// the trace is a constant to it, and one that requires a gradient no constant at all.
bool is_recorded_by_jit() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

}  // namespace

at::Tensor find_weight_cast(const at::Tensor& source, c10::ScalarType to, CastUse use) {
  ThreadCache* const cache = usable_cache<holds_casts>();
  return cache == nullptr || is_recorded_by_jit() ? at::Tensor()
                                                  : cache->casts.find(source, to, use);
}

bool is_keepable(const at::Tensor& source) {
  return TensorIdentity::exists_for(source) && !is_cached_by_torch(source);
}

void keep_weight_cast(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast,
                      CastUse use) {
  if (!TensorIdentity::exists_for(cast)) {
    return;
  }
  ThreadCache* const cache = make_cache();
  if (cache != nullptr && end_of_region_is_known(*cache)) {
    cache->casts.keep(source, to, cast, use);
  }
}

at::Tensor find_recent_cast(const at::Tensor& activation, c10::ScalarType to) {
  return t_cache == nullptr ? at::Tensor() : t_cache->recent.find(activation, to);
}

void keep_recent_cast(const at::Tensor& activation, c10::ScalarType to, const at::Tensor& cast) {
  if (TensorIdentity::exists_for(cast)) {
    if (ThreadCache* const cache = make_cache()) {
      cache->recent.keep(activation, to, cast);
    }
  }
}

std::vector<WeightToCast> begin_planned_region(const at::Tensor& weight, c10::ScalarType to) {
  ThreadCache* const cache = make_cache();
  if (cache == nullptr || !end_of_region_is_known(*cache)) {
    return {};
  }
  return cache->plans.begin(weight, to);
}

RegionFloat8Casts* usable_float8_casts() {
  ThreadCache* const cache =
      is_weight_cache_enabled() ? usable_cache<holds_float8_casts>() : nullptr;
  return cache == nullptr ? nullptr : cache->float8_casts.get();
}

RegionFloat8Casts* float8_casts_to_fill() {
  ThreadCache* const cache = is_weight_cache_enabled() ? make_cache() : nullptr;
  if (cache == nullptr || !end_of_region_is_known(*cache)) {
    return nullptr;
  }
  if (cache->float8_casts == nullptr) {
    cache->float8_casts = make_region_float8_casts();
  }
  return cache->float8_casts.get();
}

ThreadCache* prepare_thread_cache() {
  ThreadCache* const cache = make_cache();
  if (cache == nullptr) {
    prepare_to_clear_torch_cache();
  }
  return cache;
}

void on_region_entered(ThreadCache* cache, int open_regions) noexcept {
  if (cache == nullptr) {
    return;
  }
  if (open_regions == 1) {
    cache->own_regions = 1;  // Before the casts die: that may run regions inside this one.
    clear(*cache);
  } else if (cache->own_regions > 0) {
    ++cache->own_regions;
  }
}

bool on_region_left(int open_regions) noexcept {
  ThreadCache* const cache = t_cache;
  if (cache == nullptr) {
    return false;
  }
  const bool is_last_of_fastamp = cache->own_regions == 1;
  if (cache->own_regions > 0) {
    --cache->own_regions;
  }
  if (open_regions != 0 && !is_last_of_fastamp) {
    return false;
  }
  cache->own_regions = 0;
  clear(*cache);
  return true;
}

bool has_weight_casts() noexcept {
  return t_cache != nullptr && (holds_casts(*t_cache) || holds_float8_casts(*t_cache));
}

void forget_weight_casts(const std::vector<const c10::TensorImpl*>& weights) {
  if (t_cache != nullptr) {
    t_cache->casts.forget(weights);
    if (t_cache->float8_casts != nullptr) {
      forget_float8_casts(*t_cache->float8_casts, weights);
    }
  }
}

void clear_thread_cache() noexcept {
  if (t_cache != nullptr) {
    clear(*t_cache);
  }
}

}  // namespace fastamp::autocast
