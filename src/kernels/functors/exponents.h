// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/unscale.h"

#include <cstdint>

namespace fastamp::kernels {

/// Columns of a row of exponents. The first ones count finite numbers that are not 0 by the
/// exponent field of their fp32 form: column e has those of [2^(e-127), 2^(e-126)), column 0 the
/// subnormal ones of fp32. All columns only grow, and start at 0.
inline constexpr std::int64_t kInfColumn = 255;
inline constexpr std::int64_t kNanColumn = 256;
inline constexpr std::int64_t kZeroColumn = 257;
/// The columns that count end here.
inline constexpr std::int64_t kExponentBins = 258;
/// magnitude_bits() of the greatest finite number; 0: there is none but 0.
inline constexpr std::int64_t kGreatestColumn = 258;
/// kInfBits less the magnitude_bits() of the least finite number that is not 0; 0: none.
inline constexpr std::int64_t kLeastColumn = 259;
inline constexpr std::int64_t kExponentColumns = 260;

/// Where a number with these magnitude_bits() is counted.
FASTAMP_HOST_DEVICE std::int64_t exponent_column(std::uint32_t bits) {
  if (bits == 0) {
    return kZeroColumn;
  }
  return bits > kInfBits<float> ? kNanColumn : static_cast<std::int64_t>(bits >> 23U);
}

}  // namespace fastamp::kernels
