// SPDX-License-Identifier: Apache-2.0
#pragma once

// The calls of the CUDA runtime that our host code makes, over emulated streams.

#include "cuda_on_cpu/emulator/runtime.h"

#include <cstddef>
#include <cstring>

using cudaStream_t = emulator::Stream*;
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorStreamCaptureUnsupported = 900,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed = 2 };

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

inline cudaError_t cudaMalloc(void** to, std::size_t bytes) {
  if (emulator::refused_in_capture("cudaMalloc")) {
    return cudaErrorStreamCaptureUnsupported;
  }
  *to = emulator::make_permanent_memory(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulator::device().driverVersion;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  stream->submit([=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  stream->submit([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
