// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cache/change_log.h"
#include "core/system_threads.h"

#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

// Weights that were reported as written without their version counters moving; each thread has to
// forget their casts. (Moving the counters instead would make the backward pass of a graph that
// saved such a weight raise an error that LibTorch's program never had. Forgetting all casts of a
// thread would cast untouched weights twice, and their gradients would be summed in another order,
// depending on when the other thread stepped.)
namespace fastamp::autocast {

namespace detail {

constexpr std::size_t kRememberedWeights = 1U << 14U;

/// A weight may be gone and another one have its address: that one is then cast once more.
extern ChangeLog<SystemThreads, const c10::TensorImpl*, kRememberedWeights> changed_weights;

}  // namespace detail

using ChangedWeights = decltype(detail::changed_weights)::Changes;

/// How many were reported so far. Read at every use of a cache, and hardly ever written.
inline std::uint64_t count_changed_weights() { return detail::changed_weights.count(); }

/// Reports some weights. Thread-safe.
void log_changed_weights(const std::vector<const c10::TensorImpl*>& weights);

/// The weights reported after the first `seen`. Thread-safe.
ChangedWeights changed_weights_since(std::uint64_t seen);

}  // namespace fastamp::autocast
