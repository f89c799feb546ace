// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <unordered_set>
#include <vector>

// Weights that were reported as written without their version counters moving; each thread has to
// forget their casts. (Moving the counters instead would make the backward pass of a graph that
// saved such a weight raise an error that LibTorch's program never had. Forgetting all casts of a
// thread would cast untouched weights twice, and their gradients would be summed in another order,
// depending on when the other thread stepped.)
namespace fastamp::autocast {

namespace detail {
extern std::atomic<std::uint64_t> changed_weights;
}  // namespace detail

/// How many were reported so far. Read at every use of a cache, and hardly ever written.
inline std::uint64_t count_changed_weights() {
  return detail::changed_weights.load(std::memory_order_acquire);
}

struct ChangedWeights {
  std::uint64_t count = 0;  ///< How many were reported so far.
  bool all = false;         ///< More than are remembered: any weight may be among them.
  /// A weight may be gone and another one have its address: that one is then cast once more.
  std::unordered_set<const c10::TensorImpl*> keys;
};

/// Reports some weights; each counts as one. Thread-safe.
void log_changed_weights(const std::vector<const c10::TensorImpl*>& weights);

/// The weights reported after the first `seen`. Thread-safe.
ChangedWeights changed_weights_since(std::uint64_t seen);

}  // namespace fastamp::autocast
