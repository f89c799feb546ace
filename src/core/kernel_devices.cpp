// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_devices.h"

namespace fastamp {

bool has_kernels(c10::DeviceType device) {
#ifdef FASTAMP_WITH_CUDA
  return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
#else
  return device == c10::DeviceType::CPU;
#endif
}

}  // namespace fastamp
