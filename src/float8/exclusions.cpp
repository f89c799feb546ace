// SPDX-License-Identifier: Apache-2.0
#include "float8/exclusions.h"

#include "autocast/weight_requests.h"

#include <fastamp/autocast/float8.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace fastamp::autocast {
namespace {

struct Exclusions {
  std::mutex mutex;
  WeightRequests weights;
  std::atomic<bool> used{false};  ///< All that is read while no weight is excluded.
};

/// Never destroyed: other threads may run ops while the process exits.
Exclusions& exclusions() {
  static auto* excluded = new Exclusions;
  return *excluded;
}

}  // namespace

std::uint64_t exclude_from_float8(const std::vector<at::Tensor>& weights) {
  auto& excluded = exclusions();
  WeightRequests::Weights dead;  // Destroyed after the lock.
  const std::scoped_lock lock(excluded.mutex);
  dead = excluded.weights.take_dead();
  const auto id = excluded.weights.acquire(weights);
  excluded.used.store(true, std::memory_order_relaxed);
  return id;
}

void end_float8_exclusion(std::uint64_t id) {
  auto& excluded = exclusions();
  WeightRequests::Weights released;
  const std::scoped_lock lock(excluded.mutex);
  released = excluded.weights.release(id);
  excluded.used.store(!excluded.weights.empty(), std::memory_order_relaxed);
}

bool is_excluded_from_float8(const at::Tensor& weight) {
  if (!are_weights_excluded_from_float8()) {
    return false;
  }
  auto& excluded = exclusions();
  const std::scoped_lock lock(excluded.mutex);
  return excluded.weights.contains(weight.unsafeGetTensorImpl());
}

bool are_weights_excluded_from_float8() noexcept {
  return exclusions().used.load(std::memory_order_relaxed);
}

}  // namespace fastamp::autocast

namespace fastamp {

Float8ExclusionGuard::Float8ExclusionGuard(const std::vector<at::Tensor>& weights)
    : id_(autocast::exclude_from_float8(weights)) {}

void Float8ExclusionGuard::release() noexcept {
  if (const auto id = std::exchange(id_, 0); id != 0) {
    autocast::end_float8_exclusion(id);
  }
}

}  // namespace fastamp
