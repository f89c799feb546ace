// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_devices.h"

#include "core/cuda_part.h"

namespace fastamp {

bool has_kernels(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ||
         (device == c10::DeviceType::CUDA && cuda_part() != nullptr);
}

int compute_capability() {
  const auto* const part = cuda_part();
  return part == nullptr ? 0 : part->devices.compute_capability();
}

c10::DeviceIndex current_gpu() {
  const auto* const part = cuda_part();
  return part == nullptr ? c10::DeviceIndex{-1} : part->devices.current_gpu();
}

std::optional<GpuProperties> gpu_properties(c10::DeviceIndex index) {
  const auto* const part = cuda_part();
  return part == nullptr ? std::nullopt : part->devices.gpu_properties(index);
}

}  // namespace fastamp
