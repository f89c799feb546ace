// SPDX-License-Identifier: Apache-2.0
#include "autocast/weight_requests.h"

#include <utility>

namespace fastamp::autocast {

std::uint64_t WeightRequests::acquire(const std::vector<at::Tensor>& weights) {
  const auto id = next_id_++;
  acquired_.try_emplace(id);
  for (const at::Tensor& weight : weights) {
    if (weight.defined()) {
      add(id, weight);
    }
  }
  return id;
}

void WeightRequests::add(std::uint64_t id, const at::Tensor& weight) {
  const auto* key = weight.unsafeGetTensorImpl();
  auto& acquired = acquired_[id];
  if (!acquired.contains(key)) {
    acquired.emplace(key, weight.getIntrusivePtr());
    ++times_[key];
  }
}

WeightRequests::Forgotten WeightRequests::release(std::uint64_t id) {
  Forgotten forgotten;
  const auto acquired = acquired_.find(id);
  if (acquired != acquired_.end()) {
    for (auto& [key, weight] : acquired->second) {
      count_down(key, forgotten.unrequested);
      forgotten.references.push_back(std::move(weight));
    }
    acquired_.erase(acquired);
  }
  return forgotten;
}

WeightRequests::Forgotten WeightRequests::take_dead() {
  Forgotten forgotten;
  for (auto& [id, weights] : acquired_) {
    std::erase_if(weights, [&](auto& weight) {
      const bool is_dead = weight.second.expired();
      if (is_dead) {
        count_down(weight.first, forgotten.unrequested);
        forgotten.references.push_back(std::move(weight.second));
      }
      return is_dead;
    });
  }
  return forgotten;
}

void WeightRequests::count_down(const c10::TensorImpl* weight, Keys& unrequested) {
  const auto times = times_.find(weight);
  if (--times->second == 0) {
    times_.erase(times);
    unrequested.push_back(weight);
  }
}

}  // namespace fastamp::autocast
