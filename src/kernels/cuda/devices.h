// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/cuda_part.h"

namespace fastamp::kernels::cuda {

/// The answers of this process's CUDA.
CudaDevices devices();

}  // namespace fastamp::kernels::cuda
