// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

namespace c10::cuda {

/// There is one device.
struct CUDAGuard {
  explicit CUDAGuard(c10::Device /*device*/) {}
};

}  // namespace c10::cuda
