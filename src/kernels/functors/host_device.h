#pragma once

// Marks element arithmetic that CPU kernels, CUDA kernels and tests share. On the host it must be
// inlined: the callers are compiled for several instruction sets, and only inlined code is
// vectorised for the caller's.

#ifdef __CUDACC__
#define FASTAMP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTAMP_HOST_DEVICE inline __attribute__((always_inline))
#endif
