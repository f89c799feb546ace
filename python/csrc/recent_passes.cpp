// SPDX-License-Identifier: Apache-2.0
#include "recent_passes.h"

#include <utility>

namespace fastamp::python {

using scaler::PassResult;

RecentPasses& RecentPasses::get() {
  static auto* recent = new RecentPasses;
  return *recent;
}

void RecentPasses::remember(const std::shared_ptr<PassResult>& pass) {
  passes_.at(next_) = pass;
  next_ = (next_ + 1) % passes_.size();
}

std::optional<at::Tensor> RecentPasses::norm_of(
    const std::vector<scaler::DeviceGradients>& gradients, at::ScalarType dtype) const {
  std::vector<std::shared_ptr<const PassResult>> alive;
  std::vector<const PassResult*> pointers;
  for (std::size_t i = 0; i < passes_.size(); ++i) {  // The oldest first.
    if (auto pass = passes_.at((next_ + i) % passes_.size()).lock()) {
      pointers.push_back(pass.get());
      alive.push_back(std::move(pass));
    }
  }
  return pointers.empty() ? std::nullopt : scaler::norm_of_passes(pointers, gradients, dtype);
}

}  // namespace fastamp::python
