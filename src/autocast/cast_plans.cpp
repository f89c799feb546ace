// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_plans.h"

#include <algorithm>
#include <utility>

namespace fastamp::autocast {

std::vector<CastPlans::Plan>::iterator CastPlans::find(const c10::TensorImpl* key,
                                                       c10::ScalarType to) {
  return std::ranges::find_if(plans_, [&](const Plan& plan) {
    return plan.first.weight.key() == key && plan.first.to == to;
  });
}

std::vector<WeightToCast> CastPlans::begin(const at::Tensor& weight, c10::ScalarType to) {
  std::vector<WeightToCast> others;
  if (begun_) {
    return others;
  }
  begun_ = true;
  first_key_ = weight.unsafeGetTensorImpl();
  first_to_ = to;
  const auto plan = find(first_key_, to);
  if (plan == plans_.end()) {
    return others;
  }
  // Holds the last reference to a weight that its owner drops meanwhile. Its end may run code that
  // begins or ends regions, so it must come after the plan has been read.
  std::vector<at::Tensor> unfit;
  for (const PlannedCast& planned : plan->casts) {
    if (planned.to != to || planned.weight.key() == first_key_) {
      continue;
    }
    at::Tensor other = planned.weight.lock();
    if (other.defined() && other.device() == weight.device() &&
        planned.weight.is_in_same_place(other) && planned.weight.is_in_same_context(other)) {
      others.push_back({std::move(other), planned.wanted});
    } else {
      unfit.push_back(std::move(other));
    }
  }
  return others;
}

void CastPlans::end(std::vector<PlannedCast> used) {
  if (!std::exchange(begun_, false)) {
    return;
  }
  const auto old = find(first_key_, first_to_);
  if (old != plans_.end()) {
    plans_.erase(old);
  }
  std::erase_if(plans_, [](const Plan& plan) { return plan.first.weight.is_expired(); });
  const auto first = std::ranges::find_if(used, [&](const PlannedCast& cast) {
    return cast.weight.key() == first_key_ && cast.to == first_to_;
  });
  if (first == used.end()) {
    return;
  }
  if (plans_.size() == kMaxPlans) {
    plans_.erase(plans_.begin());
  }
  plans_.push_back({*first, std::move(used)});
}

}  // namespace fastamp::autocast
