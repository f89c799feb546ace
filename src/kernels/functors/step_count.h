// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counters of steps are float32, as torch's are, and have every whole number up to 2^24. From there
// on a step moves a counter to the next float: to another value each time, so that noise that is
// made of it never repeats, and the steps can be read from its bits. torch's stand still at 2^24.

#include "kernels/functors/bits.h"
#include "kernels/functors/host_device.h"

#include <cstdint>

namespace fastamp::kernels {

inline constexpr std::uint32_t kCountableSteps = 1U << 24U;
inline constexpr std::uint32_t kCountableBits = 0x4b800000U;  ///< Of a float of 2^24.
inline constexpr std::uint32_t kLargestBits = 0x7f7fffffU;    ///< Of the largest float.

/// The counter after another step. What is no count (inf, NaN) stays.
FASTAMP_HOST_DEVICE float next_count(float count) {
  const std::uint32_t bits = bits_of(count);
  return bits >= kCountableBits && bits < kLargestBits ? from_bits(bits + 1U) : count + 1.0F;
}

/// The steps that a counter has seen.
FASTAMP_HOST_DEVICE std::uint32_t steps_of(float count) {
  return count < static_cast<float>(kCountableSteps)
             ? static_cast<std::uint32_t>(count)
             : kCountableSteps + (bits_of(count) - kCountableBits);
}

/// The counter that has seen so many steps.
inline float count_of(std::uint64_t steps) {
  if (steps <= kCountableSteps) {
    return static_cast<float>(steps);
  }
  const std::uint64_t bits = kCountableBits + (steps - kCountableSteps);
  return from_bits(bits < kLargestBits ? static_cast<std::uint32_t>(bits) : kLargestBits);
}

}  // namespace fastamp::kernels
