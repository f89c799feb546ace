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

}  // namespace fastamp
