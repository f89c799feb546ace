// SPDX-License-Identifier: Apache-2.0
//
// The CUDA runtime's functions about memory.
//
// Stands for: when copies read and write. Pageable memory of the host is read before the call
// returns; pinned memory when the copy runs; the host waits for copies to pageable memory. Does not
// stand for: the speed of any of them, managed memory, copies between processes.
#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/memory.h"
#include "simulated_cuda/runtime/streams.h"
#include "simulated_cuda/simulated_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace simulated_cuda {
namespace {

constexpr int kRubbish = 0xcd;
constexpr std::size_t kPinnedAlignment = 4096;

bool is_host(const void* memory) { return device_of(memory) < 0; }

struct Rows {
  std::size_t width = 0;
  std::size_t height = 1;
  std::size_t to_pitch = 0;
  std::size_t from_pitch = 0;
};

void copy_rows(void* to, const void* from, const Rows& rows) {
  for (std::size_t row = 0; row < rows.height; ++row) {
    std::memcpy(static_cast<char*>(to) + row * rows.to_pitch,
                static_cast<const char*>(from) + row * rows.from_pitch, rows.width);
  }
}

cudaError_t copy(void* to, const void* from, const Rows& rows, cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (rows.width == 0 || rows.height == 0) return cudaSuccess;
  count(is_host(to)     ? Count::copies_to_host
        : is_host(from) ? Count::copies_to_device
                        : Count::copies_on_devices);
  const void* source = host_view(from);
  std::shared_ptr<std::vector<char>> staged;
  if (is_host(from) && !is_pinned(from)) {
    const auto* const begin = static_cast<const char*>(from);
    const std::size_t bytes = (rows.height - 1) * rows.from_pitch + rows.width;
    staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    source = staged->data();
  }
  const auto work = [to = host_view(to), source, staged, rows] { copy_rows(to, source, rows); };
  submit(*stream, work, is_host(to) ? "copy to the host" : "copy",
         is_host(to) ? Reach::kHost : Reach::kDevice);
  if (is_host(to) && !is_pinned(to) && stream->capture == nullptr) {
    count(Count::waits);
    finish(*stream);
  }
  return cudaSuccess;
}

Rows one_row(std::size_t bytes) { return {bytes, 1, bytes, bytes}; }

cudaError_t set(void* to, int value, std::size_t bytes, cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  submit(*stream, [to = host_view(to), value, bytes] { std::memset(to, value, bytes); }, "memset");
  return cudaSuccess;
}

cudaError_t allocate_pinned(void** to, std::size_t bytes) {
  if (posix_memalign(to, kPinnedAlignment, std::max<std::size_t>(bytes, 1)) != 0) {
    return cudaErrorMemoryAllocation;
  }
  std::memset(*to, kRubbish, bytes);
  pin(*to, bytes);
  return cudaSuccess;
}

}  // namespace
}  // namespace simulated_cuda

using namespace simulated_cuda;

extern "C" {

cudaError_t cudaMalloc(void** to, std::size_t bytes) {
  return call(Function::cudaMalloc, [&] {
    *to = bytes == 0 ? nullptr : allocate(thread_state().device, bytes);
    return bytes != 0 && *to == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t cudaFree(void* memory) {
  return call(Function::cudaFree, [&] {
    if (memory == nullptr) return cudaSuccess;
    finish_all();  // cudaFree waits for the device
    return release(memory) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call(Function::cudaMemGetInfo, [&] {
    *total = kDeviceBytes;
    *free = kDeviceBytes - bytes_in_use(thread_state().device);
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** to, std::size_t bytes, unsigned /*flags*/) {
  return call(Function::cudaHostAlloc, [&] { return allocate_pinned(to, bytes); });
}
cudaError_t cudaMallocHost(void** to, std::size_t bytes) {
  return call(Function::cudaMallocHost, [&] { return allocate_pinned(to, bytes); });
}

cudaError_t cudaFreeHost(void* memory) {
  return call(Function::cudaFreeHost, [&] {
    finish_all();
    unpin(memory);
    std::free(memory);
    return cudaSuccess;
  });
}

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned /*flags*/) {
  return call(Function::cudaHostRegister, [&] {
    pin(memory, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void* memory) {
  return call(Function::cudaHostUnregister, [&] {
    unpin(memory);
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* all, const void* memory) {
  return call(Function::cudaPointerGetAttributes, [&] {
    *all = {};
    all->type = cudaMemoryTypeUnregistered;
    all->device = cudaInvalidDeviceId;
    if (const int device = device_of(memory); device >= 0) {
      all->type = cudaMemoryTypeDevice;
      all->device = device;
      all->devicePointer = const_cast<void*>(memory);
      return cudaSuccess;
    }
    all->hostPointer = const_cast<void*>(memory);
    if (is_pinned(memory)) {
      all->type = cudaMemoryTypeHost;
      all->device = thread_state().device;
      all->devicePointer = const_cast<void*>(memory);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return call(Function::cudaMemcpyAsync, [&] { return copy(to, from, one_row(bytes), stream); });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int /*device*/, const void* from, int /*from_device*/,
                                std::size_t bytes, cudaStream_t stream) {
  return call(Function::cudaMemcpyPeerAsync,
              [&] { return copy(to, from, one_row(bytes), stream); });
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  return call(Function::cudaMemcpy2DAsync,
              [&] { return copy(to, from, {width, height, to_pitch, from_pitch}, stream); });
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/) {
  return call(Function::cudaMemcpy, [&] {
    const auto result = copy(to, from, one_row(bytes), nullptr);
    count(Count::waits);
    finish(*find_stream(nullptr));
    return result;
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return call(Function::cudaMemsetAsync, [&] { return set(to, value, bytes, stream); });
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return call(Function::cudaMemset, [&] { return set(to, value, bytes, nullptr); });
}

}  // extern "C"
