#include "autocast/wanted_weights.h"

#include <utility>

namespace fastamp::autocast {

std::uint64_t WantedWeights::acquire(const std::vector<at::Tensor>& weights) {
  std::vector<WeakTensor> references;
  references.reserve(weights.size());
  for (const at::Tensor& weight : weights) {
    if (weight.defined()) {
      references.emplace_back(weight.getIntrusivePtr());
      ++times_[weight.unsafeGetTensorImpl()];
    }
  }
  acquired_.emplace(next_id_, std::move(references));
  return next_id_++;
}

WantedWeights::Keys WantedWeights::release(std::uint64_t id) {
  Keys unwanted;
  const auto acquired = acquired_.find(id);
  if (acquired != acquired_.end()) {
    for (const WeakTensor& weight : acquired->second) {
      count_down(weight._unsafe_get_target(), unwanted);
    }
    acquired_.erase(acquired);
  }
  return unwanted;
}

WantedWeights::Keys WantedWeights::take_dead() {
  Keys unwanted;
  for (auto& [id, weights] : acquired_) {
    std::erase_if(weights, [&](const WeakTensor& weight) {
      const bool is_dead = weight.expired();
      if (is_dead) {
        count_down(weight._unsafe_get_target(), unwanted);
      }
      return is_dead;
    });
  }
  return unwanted;
}

void WantedWeights::count_down(const c10::TensorImpl* weight, Keys& unwanted) {
  const auto times = times_.find(weight);
  if (--times->second == 0) {
    times_.erase(times);
    unwanted.push_back(weight);
  }
}

}  // namespace fastamp::autocast
