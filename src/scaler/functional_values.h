// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace fastamp::scaler {

/// Calls ops, while it exists, below functionalization, which refuses custom ops that write.
using BelowFunctionalization = c10::impl::ExcludeDispatchKeyGuard;
inline constexpr auto kFunctionalization = c10::DispatchKey::Functionalize;

/// Copies of what functional tensors (torch.func.functionalize) stand for, to be written in their
/// place. Other tensors among them are written themselves.
class FunctionalValues {
 public:
  explicit FunctionalValues(const std::vector<at::Tensor>& tensors);

  at::TensorList values() const { return values_; }
  /// Gives the tensors the values as they are now.
  void write_back() const;

 private:
  const std::vector<at::Tensor>& tensors_;
  std::vector<at::Tensor> values_;
};

}  // namespace fastamp::scaler
