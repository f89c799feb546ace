// SPDX-License-Identifier: Apache-2.0
#include "autocast/weight_requests.h"

namespace fastamp::autocast {

std::uint64_t WeightRequests::acquire(const std::vector<at::Tensor>& weights) {
  const auto id = next_id_++;
  acquired_.try_emplace(id);
  try {
    for (const at::Tensor& weight : weights) {
      if (weight.defined()) {
        add(id, weight);
      }
    }
  } catch (...) {
    for (const auto& [key, weight] : acquired_[id]) {
      count_down(key);
    }
    acquired_.erase(id);
    throw;
  }
  return id;
}

void WeightRequests::add(std::uint64_t id, const at::Tensor& weight) {
  const auto* key = weight.unsafeGetTensorImpl();
  auto& acquired = acquired_[id];
  const auto [place, is_new] = acquired.try_emplace(key, weight.getIntrusivePtr());
  if (is_new) {
    try {
      ++times_[key];
    } catch (...) {
      acquired.erase(place);
      throw;
    }
  }
}

WeightRequests::Forgotten WeightRequests::release(std::uint64_t id) {
  Forgotten forgotten;
  const auto acquired = acquired_.find(id);
  if (acquired != acquired_.end()) {
    forgotten.unrequested.reserve(acquired->second.size());
    forgotten.references.reserve(acquired->second.size());
    for (const auto& [key, weight] : acquired->second) {
      forget(key, weight, forgotten);
    }
    acquired_.erase(acquired);
  }
  return forgotten;
}

WeightRequests::Forgotten WeightRequests::take_dead() {
  Forgotten forgotten;
  for (auto& [id, weights] : acquired_) {
    std::erase_if(weights, [&](const auto& weight) {
      const bool is_dead = weight.second.expired();
      if (is_dead) {
        forget(weight.first, weight.second, forgotten);
      }
      return is_dead;
    });
  }
  return forgotten;
}

void WeightRequests::forget(const c10::TensorImpl* key, const WeakTensor& weight,
                            Forgotten& forgotten) {
  forgotten.unrequested.push_back(key);
  forgotten.references.push_back(weight);
  if (!count_down(key)) {
    forgotten.unrequested.pop_back();
  }
}

bool WeightRequests::count_down(const c10::TensorImpl* weight) {
  const auto times = times_.find(weight);
  if (--times->second != 0) {
    return false;
  }
  times_.erase(times);
  return true;
}

}  // namespace fastamp::autocast
