// SPDX-License-Identifier: Apache-2.0
// Kernel that carries bytes to device memory in its arguments.
//
// Layout: flat; each thread moves 4 bytes at a time. Traffic: at most 32 KiB written, 4 KiB with
// drivers that take no more arguments. It runs under stream capture alone, for tables that do not
// fit the arguments of the kernel they are for. Numerics: bytes. Proof: the [tables] tests of
// tests/cpp/cuda_on_cpu.

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/upload.h"

#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fastamp::kernels::cuda {
namespace {

constexpr unsigned kUploadThreads = 1024;

template <std::size_t kBytes>
struct Parcel {
  std::uint32_t words[kBytes / sizeof(std::uint32_t)];
};

template <std::size_t kBytes>
__global__ void __launch_bounds__(kUploadThreads)
    upload_kernel(const __grid_constant__ Parcel<kBytes> parcel, std::uint32_t* to,
                  unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += kUploadThreads) {
    to[i] = parcel.words[i];
  }
}

template <std::size_t kBytes>
void upload_by_kernels(const std::vector<std::uint64_t>& data, void* to, std::size_t bytes,
                       cudaStream_t stream) {
  const auto* from = reinterpret_cast<const unsigned char*>(data.data());
  for (std::size_t at = 0; at < bytes; at += kBytes) {
    const auto n = std::min(kBytes, bytes - at);
    Parcel<kBytes> parcel;
    std::memcpy(parcel.words, from + at, n);
    launch(upload_kernel<kBytes>, 1, kUploadThreads, stream, parcel,
           reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(to) + at),
           static_cast<unsigned>((n + sizeof(std::uint32_t) - 1) / sizeof(std::uint32_t)));
  }
}

void upload_by_copy(c10::function_ref<void(void*)> fill, void* to, std::size_t bytes,
                    c10::cuda::CUDAStream stream) {
  // Another thread may be capturing; pinned memory made here is no part of what it records.
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  auto* host_allocator = at::getHostAllocator(at::kCUDA);
  const at::DataPtr pinned = host_allocator->allocate(bytes);
  fill(pinned.get());
  C10_CUDA_CHECK(cudaMemcpyAsync(to, pinned.get(), bytes, cudaMemcpyHostToDevice, stream));
  // It may be reused once the copy is done.
  host_allocator->record_event(pinned.get(), pinned.get_context(), stream.unwrap());
}

}  // namespace

bool takes_large_arguments() {
#if defined(CUDART_VERSION) && CUDART_VERSION >= 13000
  return true;  // with a runtime of CUDA 13 every driver does
#else
  int version = 0;
  C10_CUDA_CHECK(cudaDriverGetVersion(&version));
  return version >= 12010;
#endif
}

c10::DataPtr upload(std::size_t bytes, c10::function_ref<void(void*)> fill,
                    c10::cuda::CUDAStream stream) {
  constexpr auto kWord = sizeof(std::uint64_t);
  const std::size_t rounded = (bytes + kWord - 1) / kWord * kWord;
  auto resident = c10::cuda::CUDACachingAllocator::get()->allocate(rounded);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
    upload_by_copy(fill, resident.get(), bytes, stream);
  } else {
    std::vector<std::uint64_t> data(rounded / kWord);
    fill(data.data());
    const auto by_kernels = takes_large_arguments() ? upload_by_kernels<kUploadBytes>
                                                    : upload_by_kernels<kSmallUploadBytes>;
    by_kernels(data, resident.get(), rounded, stream);
  }
  return resident;
}

}  // namespace fastamp::kernels::cuda
