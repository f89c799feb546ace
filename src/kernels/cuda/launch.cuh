// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/cuda/CUDAException.h>

#include <cuda_runtime.h>

#include <utility>

namespace fastamp::kernels::cuda {

/// Launches and checks: the only way our kernels are started.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, Args&&... args) {
  kernel<<<grid, block, 0, stream>>>(std::forward<Args>(args)...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fastamp::kernels::cuda
