// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>

namespace fastamp {

/// Whether there are kernels of our ops for a device: elsewhere torch's operators are used. For
/// CUDA where core/cuda_part.h finds its code.
FASTAMP_API bool has_kernels(c10::DeviceType device);

/// The compute capability of the current CUDA device, such as 90 for 9.0; 0 without code for
/// CUDA.
int compute_capability();

/// Whether has_kernels(), or it is Meta, where every op has a kernel that only checks.
inline bool has_kernels_or_meta(c10::DeviceType device) {
  return device == c10::DeviceType::Meta || has_kernels(device);
}

}  // namespace fastamp
