// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/changed_weights.h"

namespace fastamp::autocast {

constinit decltype(detail::changed_weights) detail::changed_weights;

void log_changed_weights(const std::vector<const c10::TensorImpl*>& weights) {
  detail::changed_weights.add(weights);
}

ChangedWeights changed_weights_since(std::uint64_t seen) {
  return detail::changed_weights.since(seen);
}

}  // namespace fastamp::autocast
