// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

// The tensors that torch.func's gradient transforms put around others: one for each level.
namespace fastamp::autocast {

inline bool is_gradient_wrapper(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

/// The tensor as ops take it now: inside the wrappers of transforms that have ended.
at::Tensor without_ended_wrappers(const at::Tensor& tensor);

}  // namespace fastamp::autocast
