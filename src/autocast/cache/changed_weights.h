#pragma once

#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <unordered_set>
#include <vector>

// Weights that somebody said were written behind their version counters, and whose casts each
// thread has to forget. (Moving the counters instead would make the backward pass of a graph that
// saved such a weight raise an error that LibTorch's program never had; and forgetting all casts of
// a thread would cast weights twice that nobody touched, whose gradients then are summed in another
// order, depending on when the other thread stepped.)
namespace fastamp::autocast {

namespace detail {
extern std::atomic<std::uint64_t> changed_weights;
}  // namespace detail

/// How many were said so far. Read at every use of a cache, and hardly ever written.
inline std::uint64_t count_changed_weights() {
  return detail::changed_weights.load(std::memory_order_acquire);
}

struct ChangedWeights {
  std::uint64_t count = 0;  ///< How many were said so far.
  bool all = false;         ///< More than is remembered: any weight may be among them.
  /// A weight may be gone, and its address another's: its cast is then made once more.
  std::unordered_set<const c10::TensorImpl*> keys;
};

/// Says so of some weights, one number each. Thread-safe.
void log_changed_weights(const std::vector<const c10::TensorImpl*>& weights);

/// Those that came after the first `seen`. Thread-safe.
ChangedWeights changed_weights_since(std::uint64_t seen);

}  // namespace fastamp::autocast
