// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fastamp {

/// Returns how often a tensor was written in place. It must have a version: inference tensors have
/// none.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// Marks a tensor as written. Inference and undefined tensors have no version; no backward can have
/// saved them.
inline void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace fastamp
