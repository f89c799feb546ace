// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"

#include <cstdint>
#include <cstring>

namespace fastamp::kernels {

FASTAMP_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FASTAMP_HOST_DEVICE float from_bits(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace fastamp::kernels
