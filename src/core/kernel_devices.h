// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>

#include <c10/core/DeviceType.h>

namespace fastamp {

/// Whether this build has kernels of our ops for a device: elsewhere torch's operators are used.
FASTAMP_API bool has_kernels(c10::DeviceType device);

/// The same, or Meta, where every op has a kernel that checks and computes nothing.
inline bool has_kernels_or_meta(c10::DeviceType device) {
  return device == c10::DeviceType::Meta || has_kernels(device);
}

}  // namespace fastamp
