// SPDX-License-Identifier: Apache-2.0
//
// The CUDA runtime's functions about kernels, and those that nvcc's stubs call: launch.h says what
// they stand for. Attributes of kernels are the same for all: registers and occupancy are the
// compiled tests' (tests/python/kernels/test_cuda_code.py).
#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

namespace simulated_cuda {
namespace {

/// What <<< >>> says, kept until the stub launches.
struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared;
  cudaStream_t stream;
};

std::vector<Configuration>& configurations() {
  thread_local std::vector<Configuration> all;
  return all;
}

void set_blocks(int* blocks, int threads) {
  constexpr int kThreads = 2048;
  *blocks = std::max(1, kThreads / std::max(threads, 1));
}

}  // namespace
}  // namespace simulated_cuda

using namespace simulated_cuda;

extern "C" {

void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}
void __cudaUnregisterFatBinary(void** /*handle*/) {}
char __cudaInitModule(void** /*handle*/) { return 1; }
void __cudaRegisterVar(void** /*handle*/, char* /*variable*/, char* /*address*/,
                       const char* /*name*/, int /*extends*/, std::size_t /*size*/,
                       int /*constant*/, int /*global*/) {}

void __cudaRegisterFunction(void** /*handle*/, const char* stub, char* /*function*/,
                            const char* name, int /*limit*/, uint3* /*thread*/, uint3* /*block*/,
                            dim3* /*threads*/, dim3* /*blocks*/, int* /*warp_size*/) {
  register_kernel(stub, name);
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     CUstream_st* stream) {
  configurations().push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  const Configuration last = configurations().back();
  configurations().pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments,
                             std::size_t /*shared*/, cudaStream_t stream) {
  return call(Function::cudaLaunchKernel,
              [&] { return launch(stub, grid, block, arguments, stream); });
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared,
                          stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid, dim3 block, void** arguments,
                                        std::size_t /*shared*/, cudaStream_t stream) {
  return call(Function::cudaLaunchCooperativeKernel,
              [&] { return launch(stub, grid, block, arguments, stream); });
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub,
                                void** arguments) {
  return call(Function::cudaLaunchKernelExC, [&] {
    return launch(stub, config->gridDim, config->blockDim, arguments, config->stream);
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*stub*/) {
  return call(Function::cudaFuncGetAttributes, [&] {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncSetAttribute(const void* /*stub*/, cudaFuncAttribute /*attribute*/,
                                 int /*value*/) {
  return call(Function::cudaFuncSetAttribute, [] { return cudaSuccess; });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* /*stub*/,
                                                          int threads, std::size_t /*shared*/) {
  return call(Function::cudaOccupancyMaxActiveBlocksPerMultiprocessor, [&] {
    set_blocks(blocks, threads);
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* /*stub*/, int threads, std::size_t /*shared*/, unsigned /*flags*/) {
  return call(Function::cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, [&] {
    set_blocks(blocks, threads);
    return cudaSuccess;
  });
}

}  // extern "C"
