// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <optional>
#include <string>

namespace fastamp {

/// Whether this build has kernels of our ops for a device: elsewhere torch's operators are used.
FASTAMP_API bool has_kernels(c10::DeviceType device);

/// The compute capability of the current CUDA device, such as 90 for 9.0; 0 in a build without
/// CUDA.
int compute_capability();

struct GpuProperties {
  std::string name;  ///< As the driver says it.
  int capability;    ///< As compute_capability().
  int multiprocessors;
  double peak_bandwidth;  ///< Bytes/s of the memory; 0 if the driver does not say.
};

/// The current CUDA device; -1 in a build without CUDA, and where there is no device.
c10::DeviceIndex current_gpu();

/// None in a build without CUDA, and of a device that is not there.
std::optional<GpuProperties> gpu_properties(c10::DeviceIndex index);

/// As has_kernels(); also Meta, where every op has a kernel that checks and computes nothing.
inline bool has_kernels_or_meta(c10::DeviceType device) {
  return device == c10::DeviceType::Meta || has_kernels(device);
}

}  // namespace fastamp
