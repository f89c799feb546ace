// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <cuda_runtime_api.h>

#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == cudaSuccess, "emulated CUDA error: " #call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()
