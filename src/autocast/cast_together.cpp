// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_together.h"

#include "autocast/data_cast.h"
#include "autocast/thread_cache.h"
#include "autocast/weight_requests.h"
#include "core/interception.h"
#include "trace/events.h"

#include <fastamp/autocast/cast_together.h>

#include <mutex>
#include <utility>

namespace fastamp::autocast {

std::atomic<int> g_together_requests{0};

namespace {

struct LockedRequests {
  std::mutex mutex;
  WeightRequests requests;
};

/// Never destroyed: other threads may run ops while the process exits.
LockedRequests& locked_requests() {
  static auto* instance = new LockedRequests;
  return *instance;
}

/// Whether the joint cast is made just as the weight's own would be; unusual weights are left out.
bool can_join(const at::Tensor& weight) {
  return is_weight(weight) && can_bypass_dispatcher(weight) && is_keepable(weight) &&
         weight.is_non_overlapping_and_dense();
}

}  // namespace

std::uint64_t acquire_cast_together(const std::vector<at::Tensor>& weights) {
  auto& all = locked_requests();
  WeightRequests::Weights dead;  // Destroyed after the lock is released.
  const std::scoped_lock lock(all.mutex);
  dead = all.requests.take_dead();
  const auto id = all.requests.acquire(weights);
  g_together_requests.fetch_add(1, std::memory_order_relaxed);
  return id;
}

void release_cast_together(std::uint64_t id) {
  auto& all = locked_requests();
  WeightRequests::Weights released;  // Destroyed after the lock is released.
  const std::scoped_lock lock(all.mutex);
  released = all.requests.release(id);
  g_together_requests.fetch_sub(1, std::memory_order_relaxed);
}

bool is_cast_together(const at::Tensor& weight) {
  auto& all = locked_requests();
  const std::scoped_lock lock(all.mutex);
  return all.requests.contains(weight.unsafeGetTensorImpl());
}

std::vector<WeightToCast> those_cast_together(const std::vector<WeightToCast>& weights) {
  std::vector<WeightToCast> found;
  found.reserve(weights.size());
  auto& all = locked_requests();
  // No tensor is destroyed under the lock: that may need the GIL, which a thread that waits for the
  // lock may hold.
  const std::scoped_lock lock(all.mutex);
  for (const WeightToCast& weight : weights) {
    if (all.requests.contains(weight.weight.unsafeGetTensorImpl())) {
      found.push_back(weight);
    }
  }
  return found;
}

at::Tensor cast_with_others(const CastSource& source, c10::ScalarType to) {
  const at::Tensor& weight = source.tensor;
  if (!source.region_keeps || !weight.is_non_overlapping_and_dense() || !is_cast_together(weight)) {
    return {};
  }
  std::vector<at::Tensor> weights;
  for (auto& [other, unused] : those_cast_together(begin_planned_region(weight, to))) {
    if (can_join(other)) {
      weights.push_back(std::move(other));
    }
  }
  if (weights.empty()) {
    return {};
  }
  weights.push_back(weight);
  const auto casts = cast_data_together(weights, to);
  for (std::size_t i = 0; i + 1 < weights.size(); ++i) {
    note_cast(CastEvent::kWeightCast, casts[i]);
    keep_weight_cast(weights[i], to, casts[i], CastUse::kLater);
  }
  return casts.back();
}

}  // namespace fastamp::autocast

namespace fastamp {

CastTogetherGuard::CastTogetherGuard(const std::vector<at::Tensor>& weights)
    : id_(autocast::acquire_cast_together(weights)) {}

CastTogetherGuard::~CastTogetherGuard() { release(); }

void CastTogetherGuard::release() {
  const auto id = std::exchange(id_, 0);
  if (id != 0) {
    autocast::release_cast_together(id);
  }
}

}  // namespace fastamp
