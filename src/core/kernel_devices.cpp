// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_devices.h"

#ifdef FASTAMP_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
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

}  // namespace fastamp
