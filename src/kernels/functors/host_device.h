// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks element arithmetic that CPU kernels, CUDA kernels and tests share. On the host it must be
// inlined, as all that CPU kernels call in their loops (kernels/cpu/targets.h).

#ifdef __CUDACC__
#define FASTAMP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTAMP_HOST_DEVICE inline __attribute__((always_inline))
#endif
