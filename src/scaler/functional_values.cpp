// SPDX-License-Identifier: Apache-2.0
#include "scaler/functional_values.h"

#include <ATen/FunctionalTensorWrapper.h>

#include <cstddef>

namespace fastamp::scaler {

namespace functional = at::functionalization::impl;

FunctionalValues::FunctionalValues(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {
  const BelowFunctionalization below(kFunctionalization);
  values_.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    if (functional::isFunctionalTensor(tensor)) {
      functional::sync(tensor);
      values_.push_back(functional::from_functional_tensor(tensor).clone());
    } else {
      values_.push_back(tensor);
    }
  }
}

void FunctionalValues::write_back() const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (functional::isFunctionalTensor(tensors_[i])) {
      functional::replace_(tensors_[i], values_[i]);
      functional::commit_update(tensors_[i]);
      functional::sync(tensors_[i]);
    }
  }
}

}  // namespace fastamp::scaler
