// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/zeroed_workspace.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace fastamp::kernels::cuda {
namespace {

constexpr std::size_t kLeastBytes = 4096;

/// Memory for the rest of the process, from the driver: the caching allocator may be serving a pool
/// at the time (a MemPool, that of graph trees), whose owner reclaims what is in it.
void* allocate_for_good(std::size_t bytes) {
  // Another thread may be capturing; this is no part of what it records.
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) == cudaSuccess) {
    return memory;
  }
  static_cast<void>(cudaGetLastError());  // or the next launch would report it
  c10::cuda::CUDACachingAllocator::emptyCache();
  C10_CUDA_CHECK(cudaMalloc(&memory, bytes));
  return memory;
}

struct Block {
  void* memory = nullptr;
  std::size_t bytes = 0;
};

/// The memory of a stream, replaced by a larger one if it is too small. The smaller one is kept for
/// kernels that other threads may be about to launch; doubling bounds what that costs.
void* memory_of_stream(std::size_t bytes, c10::cuda::CUDAStream stream) {
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
  static std::mutex mutex;
  // Never destroyed: threads may still be launching while the process exits.
  static auto* const blocks = new std::map<Key, Block>();
  const std::scoped_lock lock(mutex);
  Block& block = (*blocks)[{stream.device_index(), stream.id()}];
  if (block.bytes < bytes) {
    const auto enough = std::max({bytes, 2 * block.bytes, kLeastBytes});
    void* const memory = allocate_for_good(enough);
    C10_CUDA_CHECK(cudaMemsetAsync(memory, 0, enough, stream));
    block = {memory, enough};
  }
  return block.memory;
}

}  // namespace

ZeroedWorkspace::ZeroedWorkspace(std::size_t bytes, c10::cuda::CUDAStream stream) {
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
    memory_ = memory_of_stream(bytes, stream);
  } else {
    graph_memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
    memory_ = graph_memory_.get();
    C10_CUDA_CHECK(cudaMemsetAsync(memory_, 0, bytes, stream));
  }
}

}  // namespace fastamp::kernels::cuda
