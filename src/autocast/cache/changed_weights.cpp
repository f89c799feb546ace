// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/changed_weights.h"

#include <cstddef>
#include <mutex>
#include <vector>

namespace fastamp::autocast {

constinit std::atomic<std::uint64_t> detail::changed_weights{0};

namespace {

/// How far a thread may fall behind; one that is further behind forgets all its casts.
constexpr std::size_t kRemembered = 1U << 14U;

struct Log {
  std::mutex mutex;
  std::vector<const c10::TensorImpl*>
      ring;  ///< Weight number n is at n % kRemembered; grows up to that.
};

Log& change_log() {
  // Never destroyed: other threads may run ops while the process exits.
  static auto* log = new Log;
  return *log;
}

}  // namespace

void log_changed_weights(const std::vector<const c10::TensorImpl*>& weights) {
  auto& log = change_log();
  const std::scoped_lock lock(log.mutex);
  auto count = detail::changed_weights.load(std::memory_order_relaxed);
  for (const auto* weight : weights) {
    const std::size_t place = count % kRemembered;
    if (place == log.ring.size()) {
      log.ring.push_back(weight);
    } else {
      log.ring[place] = weight;
    }
    ++count;
  }
  detail::changed_weights.store(count, std::memory_order_release);
}

ChangedWeights changed_weights_since(std::uint64_t seen) {
  ChangedWeights changed;
  auto& log = change_log();
  const std::scoped_lock lock(log.mutex);
  changed.count = detail::changed_weights.load(std::memory_order_relaxed);
  changed.all = changed.count - seen > kRemembered;
  for (auto i = changed.all ? changed.count : seen; i < changed.count; ++i) {
    changed.keys.insert(log.ring[i % kRemembered]);
  }
  return changed;
}

}  // namespace fastamp::autocast
