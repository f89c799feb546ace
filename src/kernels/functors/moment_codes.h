// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moments in 8 bits: codes of one byte, and for each group of 32, 64 or 128 of them a scale of one
// byte, a power of two. A code is the upper end of a float: a first moment (kFirst) has a sign, 4
// bits of exponent and 3 of significand; a second one (kSecond) 5 and 3, and no sign. Code 0 is 0
// and the next one 1.125 units of the lowest exponent: there are no subnormals. So a code becomes a
// float, and a float a code, by shifts and sums of integers: the same bits on every device.
//
// The scale of a group is the least one that reaches its largest magnitude, so nothing overflows
// (but for magnitudes above 1.875 * 2^127, which become that). Below the smallest code a first
// moment becomes 0, and a second one the smallest code: it is never 0 unless it was 0. First
// moments are rounded to nearest even, which makes them at most 1.0625 times larger; second ones by
// noise to one of the two codes around them, which makes them at most 1.125 times smaller. So for
// the same moments a step is at most 1.0625 * sqrt(1.125) < 1.13 times that of float32, whatever
// else is in the group; where first ones need noise, too (narrow_moments.h), 1.125 * sqrt(1.125) <
// 1.2 times. The smallest magnitudes are 1.125 * 2^-126.
//
// A moment that is inf or NaN makes its whole group NaN: nothing is hidden, and no scale is lost.

#include "kernels/functors/bits.h"
#include "kernels/functors/host_device.h"

#include <cstdint>

namespace fastamp::kernels {

/// Scale of a group with an inf or a NaN.
inline constexpr std::uint32_t kNotFiniteScale = 255;

/// Codes whose exponents have so many bits. `Scale`s are the exponent of the lowest codes, as a
/// float has it.
template <std::uint32_t kExponentBits>
struct MomentCodes {
  static constexpr std::uint32_t kExponents = 1U << kExponentBits;
  static constexpr std::uint32_t kTop = 8U * kExponents - 1U;
  static constexpr std::uint32_t kUnit = 1U << 20U;  ///< Of a code, in bits of a float.
  static constexpr std::uint32_t kSignCode = kTop == 0xffU ? 0U : 0x80U;

  /// The scale of a group.
  /// @param greatest  The bits of its largest magnitude; as integers they are ordered as the
  ///                  magnitudes, with inf and NaN above all.
  static FASTAMP_HOST_DEVICE std::uint32_t scale(std::uint32_t greatest) {
    // The least exponent e with greatest <= 1.875 * 2^e.
    const std::uint32_t top = (greatest + (kUnit - 1U)) >> 23U;
    const std::uint32_t held = top > 254U ? 254U : top;
    const std::uint32_t lowest = held < kExponents ? 1U : held - (kExponents - 1U);
    return greatest < 0x7f800000U ? lowest : kNotFiniteScale;
  }

  static FASTAMP_HOST_DEVICE float decode(std::uint32_t code, std::uint32_t scale) {
    const std::uint32_t magnitude = code & kTop;
    const std::uint32_t bits = (magnitude << 20U) + (scale << 23U);
    const std::uint32_t sign = (code & kSignCode) << 24U;
    const std::uint32_t value = (magnitude != 0U ? bits : 0U) | sign;
    return from_bits(scale != kNotFiniteScale ? value : 0x7fc00000U);
  }

  /// Rounds to the nearest code, to the even one of two.
  static FASTAMP_HOST_DEVICE std::uint32_t nearest(float value, std::uint32_t scale) {
    const std::uint32_t odd = (bits_of(value) >> 20U) & 1U;
    return encode(value, scale, (kUnit / 2U - 1U) + odd);
  }

  /// Up or down, so that the mean over all noise is the value.
  /// @param noise  Evenly distributed in [0, 2^20).
  static FASTAMP_HOST_DEVICE std::uint32_t stochastic(float value, std::uint32_t scale,
                                                      std::uint32_t noise) {
    return encode(value, scale, noise);
  }

 private:
  static FASTAMP_HOST_DEVICE std::uint32_t encode(float value, std::uint32_t scale,
                                                  std::uint32_t added) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    const std::uint32_t zero = scale << 23U;
    const std::uint32_t rounded = (magnitude - zero + added) >> 20U;
    const std::uint32_t held = rounded > kTop ? kTop : rounded;
    const std::uint32_t least = kSignCode == 0U && magnitude != 0U ? 1U : 0U;
    const std::uint32_t code = magnitude < zero + kUnit ? least : held;
    const std::uint32_t sign = (bits >> 24U) & kSignCode;
    return scale != kNotFiniteScale ? code | sign : 0U;
  }
};

using FirstMomentCodes = MomentCodes<4>;
using SecondMomentCodes = MomentCodes<5>;

/// The noise of a moment, of 32 bits of noise: first and second moments share 8 of them, the least
/// of one and the greatest of the other.
template <typename Codes>
FASTAMP_HOST_DEVICE std::uint32_t noise_of(std::uint32_t bits) {
  return Codes::kSignCode == 0U ? bits >> 12U : bits & 0xfffffU;
}

}  // namespace fastamp::kernels
