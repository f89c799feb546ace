// SPDX-License-Identifier: Apache-2.0
//
// The CUDA runtime's functions about devices, versions and errors.
//
// Stands for: devices of one kind, whose compute capability SIMULATED_CUDA_CAPABILITY gives. Does
// not stand for: peer access (torch then copies through the runtime), properties that nobody asks
// for (0), limits of the real device of that capability.
#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/launch.h"
#include "simulated_cuda/runtime/memory.h"
#include "simulated_cuda/runtime/settings.h"
#include "simulated_cuda/runtime/streams.h"

#include <cuda_runtime_api.h>

#include <dlfcn.h>

#include <cstdio>
#include <utility>

namespace simulated_cuda {
namespace {

bool is_device(int device) { return device >= 0 && device < settings().devices; }

cudaDeviceProp properties(int device) {
  constexpr int kKiB = 1024;
  cudaDeviceProp all = {};
  std::snprintf(all.name, sizeof(all.name), "Simulated CUDA device");
  all.uuid.bytes[0] = static_cast<char>(device + 1);
  all.pciBusID = device + 1;
  all.major = settings().capability / 10;
  all.minor = settings().capability % 10;
  all.totalGlobalMem = kDeviceBytes;
  all.l2CacheSize = 50 * kKiB * kKiB;
  all.memoryBusWidth = 5120;
  all.warpSize = 32;
  all.multiProcessorCount = 2;
  all.maxThreadsPerBlock = 1024;
  all.maxThreadsPerMultiProcessor = 2048;
  all.maxBlocksPerMultiProcessor = 32;
  all.maxThreadsDim[0] = all.maxThreadsDim[1] = 1024;
  all.maxThreadsDim[2] = 64;
  all.maxGridSize[0] = 2147483647;
  all.maxGridSize[1] = all.maxGridSize[2] = 65535;
  all.sharedMemPerBlock = std::size_t{48} * kKiB;
  all.sharedMemPerBlockOptin = std::size_t{227} * kKiB;
  all.sharedMemPerMultiprocessor = std::size_t{228} * kKiB;
  all.regsPerBlock = all.regsPerMultiprocessor = 64 * kKiB;
  all.totalConstMem = std::size_t{64} * kKiB;
  all.asyncEngineCount = 3;
  all.concurrentKernels = all.unifiedAddressing = all.canMapHostMemory = 1;
  all.streamPrioritiesSupported = 1;
  return all;
}

int attribute_of(const cudaDeviceProp& all, cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return all.major;
    case cudaDevAttrComputeCapabilityMinor:
      return all.minor;
    case cudaDevAttrMultiProcessorCount:
      return all.multiProcessorCount;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return all.memoryBusWidth;
    case cudaDevAttrWarpSize:
      return all.warpSize;
    case cudaDevAttrMaxThreadsPerBlock:
      return all.maxThreadsPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(all.sharedMemPerBlockOptin);
    default:
      return 0;
  }
}

}  // namespace
}  // namespace simulated_cuda

using namespace simulated_cuda;

extern "C" {

cudaError_t cudaGetDeviceCount(int* devices) {
  const auto result = call(Function::cudaGetDeviceCount, [&] {
    *devices = settings().devices;
    return *devices > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
  if (result == cudaSuccess) {
    open_redirection();
  }
  return result;
}

cudaError_t cudaGetDevice(int* device) {
  return call(Function::cudaGetDevice, [&] {
    *device = thread_state().device;
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call(Function::cudaSetDevice, [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    thread_state().device = device;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int device) {
  return call(Function::cudaGetDeviceProperties, [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    *all = properties(device);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call(Function::cudaDeviceGetAttribute, [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    *value = attribute_of(properties(device), attribute);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  return call(Function::cudaDeviceGetPCIBusId, [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    std::snprintf(id, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int /*device*/, int /*peer*/) {
  return call(Function::cudaDeviceCanAccessPeer, [&] {
    *can = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) {
  return call(Function::cudaDeviceEnablePeerAccess, [] { return cudaErrorNotSupported; });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call(Function::cudaDeviceGetStreamPriorityRange, [&] {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call(Function::cudaDeviceSynchronize, [] {
    count(Count::waits);
    finish_all();
    return cudaSuccess;
  });
}

cudaError_t cudaDriverGetVersion(int* version) {
  return call(Function::cudaDriverGetVersion, [&] {
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return call(Function::cudaRuntimeGetVersion, [&] {
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* found) {
  return call(Function::cudaGetDriverEntryPointByVersion, [&] {
    *function = dlsym(RTLD_DEFAULT, name);
    if (found != nullptr) {
      *found =
          *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaProfilerStart() {
  return call(Function::cudaProfilerStart, [] { return cudaSuccess; });
}
cudaError_t cudaProfilerStop() {
  return call(Function::cudaProfilerStop, [] { return cudaSuccess; });
}

cudaError_t cudaGetLastError() { return std::exchange(thread_state().error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return thread_state().error; }
const char* cudaGetErrorName(cudaError_t error) { return name_of(error); }
const char* cudaGetErrorString(cudaError_t error) { return text_of(error); }

}  // extern "C"
