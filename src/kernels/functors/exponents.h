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

/// Sample: which blocks of a list of tensors are counted: each `every`-th, in a row that goes from
/// the one that `phase` names through all tensors askew, so that small tensors take turns too.
struct BlockSample {
  static constexpr std::int64_t kBlockNumel = 2048;

  std::int64_t every = 1;
  std::int64_t phase = 0;  ///< From 0 to every - 1.

  FASTAMP_HOST_DEVICE bool takes(std::int64_t tensor, std::int64_t block) const {
    return every == 1 || (tensor + block) % every == phase;
  }

  /// Number of elements of a tensor that are counted.
  std::int64_t numel_of(std::int64_t tensor, std::int64_t numel) const {
    if (every == 1) {
      return numel;
    }
    const auto blocks = (numel + kBlockNumel - 1) / kBlockNumel;
    const auto first = ((phase - tensor) % every + every) % every;
    if (first >= blocks) {
      return 0;
    }
    const auto taken = (blocks - 1 - first) / every + 1;
    const bool takes_last = (blocks - 1 - first) % every == 0;
    return taken * kBlockNumel - (takes_last ? blocks * kBlockNumel - numel : 0);
  }
};

/// Index at which a number with these magnitude_bits() is counted.
FASTAMP_HOST_DEVICE std::int64_t exponent_column(std::uint32_t bits) {
  if (bits == 0) {
    return kZeroColumn;
  }
  return bits > kInfBits<float> ? kNanColumn : static_cast<std::int64_t>(bits >> 23U);
}

}  // namespace fastamp::kernels
