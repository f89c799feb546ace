// SPDX-License-Identifier: Apache-2.0
#include "autocast/weight_requests.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

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

WeightRequests::Weights WeightRequests::release(std::uint64_t id) noexcept {
  auto acquired = acquired_.extract(id);
  if (acquired.empty()) {
    return {};
  }
  auto weights = std::move(acquired.mapped());
  std::erase_if(weights, [this](const auto& weight) { return !count_down(weight.first); });
  return weights;
}

WeightRequests::Weights WeightRequests::take_dead() {
  const auto is_dead = [](const auto& weight) { return weight.second.expired(); };
  std::ptrdiff_t count = 0;
  for (const auto& [id, weights] : acquired_) {
    count += std::ranges::count_if(weights, is_dead);
  }
  Weights dead;
  dead.reserve(static_cast<std::size_t>(count));  // What comes then needs no memory.
  for (auto& [id, weights] : acquired_) {
    for (auto weight = weights.begin(); weight != weights.end();) {
      const auto next = std::next(weight);
      if (is_dead(*weight)) {
        count_down(weight->first);
        dead.insert(weights.extract(weight));
      }
      weight = next;
    }
  }
  return dead;
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
