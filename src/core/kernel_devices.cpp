// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_devices.h"

#ifdef FASTAMP_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cuda_runtime_api.h>
#endif

namespace fastamp {

bool has_kernels(c10::DeviceType device) {
#ifdef FASTAMP_WITH_CUDA
  return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
#else
  return device == c10::DeviceType::CPU;
#endif
}

int compute_capability() {
#ifdef FASTAMP_WITH_CUDA
  const auto* const device = at::cuda::getCurrentDeviceProperties();
  return 10 * device->major + device->minor;
#else
  return 0;
#endif
}

c10::DeviceIndex current_gpu() {
#ifdef FASTAMP_WITH_CUDA
  return c10::cuda::device_count() == 0 ? c10::DeviceIndex{-1} : c10::cuda::current_device();
#else
  return -1;
#endif
}

std::optional<GpuProperties> gpu_properties([[maybe_unused]] c10::DeviceIndex index) {
#ifdef FASTAMP_WITH_CUDA
  if (index < 0 || index >= c10::cuda::device_count()) {
    return std::nullopt;
  }
  const auto* const device = at::cuda::getDeviceProperties(index);
  int kilohertz = 0;
  int bits = 0;
  // No error where a driver does not know them. cudaDeviceProp has lost the clock in CUDA 13.
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, index) != cudaSuccess ||
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, index) != cudaSuccess) {
    kilohertz = 0;
    (void)cudaGetLastError();
  }
  return GpuProperties{.name = device->name,
                       .capability = 10 * device->major + device->minor,
                       .multiprocessors = device->multiProcessorCount,
                       .peak_bandwidth = 2 * 1e3 * kilohertz * bits / 8};  // Both clock edges.
#else
  return std::nullopt;
#endif
}

}  // namespace fastamp
