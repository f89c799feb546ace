// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

namespace at::cuda {

inline const emulator::Device* getCurrentDeviceProperties() { return &emulator::device(); }
inline c10::cuda::CUDAStream getCurrentCUDAStream() { return c10::cuda::getCurrentCUDAStream(); }

}  // namespace at::cuda
