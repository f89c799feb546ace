// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/bits.h"
#include "kernels/functors/host_device.h"
#include "kernels/functors/unscale.h"

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <cstdint>

namespace fastamp::kernels {

/// Traits that the arithmetic needs to know of a format: its largest finite value is 1.75 * 2^kTop,
/// its smallest normal one 2^kBottom.
template <typename Out>
struct Float8Format;

template <>
struct Float8Format<c10::Float8_e4m3fn> {
  static constexpr std::uint32_t kTop = 8;
  static constexpr std::int32_t kBottom = -6;
  static constexpr std::int32_t kMantissaBits = 3;
  static constexpr float kMax = 448.0F;
  static constexpr std::uint8_t kOfInfinity = 0x7f;  ///< It has no inf: NaN.
};

template <>
struct Float8Format<c10::Float8_e5m2> {
  static constexpr std::uint32_t kTop = 15;
  static constexpr std::int32_t kBottom = -14;
  static constexpr std::int32_t kMantissaBits = 2;
  static constexpr float kMax = 57344.0F;
  static constexpr std::uint8_t kOfInfinity = 0x7c;
};

/// Result of one read of a tensor, as the bits of float32 magnitudes: zeros before the first
/// element. Trivial, for shared memory.
struct Float8Magnitudes {
  std::uint32_t amax;     ///< The largest finite one.
  std::uint32_t largest;  ///< Of inf and NaN too.

  FASTAMP_HOST_DEVICE void include(float value) {
    const std::uint32_t magnitude = magnitude_bits(value);
    largest = magnitude > largest ? magnitude : largest;
    const std::uint32_t finite = magnitude < kInfBits<float> ? magnitude : 0U;
    amax = finite > amax ? finite : amax;
  }
  FASTAMP_HOST_DEVICE void include(const Float8Magnitudes& others) {
    amax = others.amax > amax ? others.amax : amax;
    largest = others.largest > largest ? others.largest : largest;
  }
  FASTAMP_HOST_DEVICE bool is_finite() const { return largest < kInfBits<float>; }
};

/// The exponent field of the power of two that brings `amax`, the bits of the largest finite
/// magnitude of a tensor, into the top binade of a format: 2^floor(log2(max / amax)), computed
/// without a division or a logarithm. 1 for amax 0; at most 2^126, so that the inverse is normal.
template <std::uint32_t kTop>
FASTAMP_HOST_DEVICE std::uint32_t float8_exponent(std::uint32_t amax) {
  if (amax == 0) {
    return 127;
  }
  // The sum carries into the exponent if the significand is above 1.75, the format's largest.
  const std::uint32_t exponent = kTop + 254U - ((amax + 0x1fffffU) >> 23U);
  return exponent < 253U ? exponent : 253U;
}

template <typename Out>
FASTAMP_HOST_DEVICE float float8_scale(std::uint32_t amax) {
  return from_bits(float8_exponent<Float8Format<Out>::kTop>(amax) << 23U);
}

/// 1 / scale, exact, since a scale is a power of two.
FASTAMP_HOST_DEVICE float inverse_of_power_of_two(float scale) {
  return from_bits((254U << 23U) - bits_of(scale));
}

/// The bits of a value within the format's range, rounded to the nearest, ties to even. Without
/// branches, so that compilers vectorise it, and without torch's conversions, which change from
/// version to version.
template <typename Out>
FASTAMP_HOST_DEVICE std::uint8_t float8_bits_in_range(float value) {
  using Format = Float8Format<Out>;
  constexpr auto kDropped = static_cast<std::uint32_t>(23 - Format::kMantissaBits);
  constexpr auto kRebias = static_cast<std::uint32_t>(Format::kBottom + 126) << 23U;
  // In a float of this size, the last place is the unit of the format's subnormals.
  constexpr auto kMagic =
      static_cast<std::uint32_t>(Format::kBottom + 127 + 23 - Format::kMantissaBits) << 23U;
  const std::uint32_t magnitude = magnitude_bits(value);
  const std::uint32_t ties = (1U << (kDropped - 1U)) - 1U + ((magnitude >> kDropped) & 1U);
  const std::uint32_t normal = (magnitude - kRebias + ties) >> kDropped;
  const std::uint32_t subnormal = bits_of(from_bits(magnitude) + from_bits(kMagic)) - kMagic;
  const std::uint32_t rounded = magnitude < kRebias + (1U << 23U) ? subnormal : normal;
  return static_cast<std::uint8_t>(rounded | ((bits_of(value) >> 24U) & 0x80U));
}

/// A finite element: scaled, limited to the format's range, rounded to the nearest, ties to even.
/// With the scale of the tensor's own amax nothing is beyond the range.
template <typename Out>
FASTAMP_HOST_DEVICE Out float8_of_finite(float value, float scale) {
  constexpr float kMax = Float8Format<Out>::kMax;
  const float scaled = value * scale;
  const float above = scaled < -kMax ? -kMax : scaled;
  return Out(float8_bits_in_range<Out>(above > kMax ? kMax : above), Out::from_bits());
}

/// Two finite elements, the first in the low byte.
///
/// Processors from 8.9 on convert pairs in one instruction, which rounds and limits as the text for
/// the others does; it would take inf to the largest value.
template <typename Out>
FASTAMP_HOST_DEVICE std::uint16_t float8_pair_of_finite(float first, float second, float scale) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  if constexpr (Float8Format<Out>::kTop == Float8Format<c10::Float8_e4m3fn>::kTop) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(pair)
        : "f"(second * scale), "f"(first * scale));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;"
        : "=h"(pair)
        : "f"(second * scale), "f"(first * scale));
  }
  return pair;
#else
  const unsigned low = float8_of_finite<Out>(first, scale).x;
  const unsigned high = float8_of_finite<Out>(second, scale).x;
  return static_cast<std::uint16_t>(low | (high << 8U));
#endif
}

/// inf or NaN, with its sign: never a finite value. Bits of our own, since later versions of torch
/// saturate in the conversion.
template <typename Out>
FASTAMP_HOST_DEVICE Out float8_of_non_finite(float value) {
  const auto sign = static_cast<std::uint8_t>((bits_of(value) >> 24U) & 0x80U);
  const std::uint8_t magnitude =
      magnitude_bits(value) == kInfBits<float> ? Float8Format<Out>::kOfInfinity : 0x7f;
  return Out(static_cast<std::uint8_t>(sign | magnitude), Out::from_bits());
}

/// Any element: NaN stays NaN; inf stays inf in e5m2 and becomes NaN in e4m3fn.
template <typename Out>
FASTAMP_HOST_DEVICE Out float8_of(float value, float scale) {
  return magnitude_bits(value) < kInfBits<float> ? float8_of_finite<Out>(value, scale)
                                                 : float8_of_non_finite<Out>(value);
}

/// Rows over which a column is summed in fp32, in order. The sums of such tiles are added in fp64,
/// in order, and the total is rounded once.
inline constexpr std::int64_t kFloat8TileRows = 16;

}  // namespace fastamp::kernels
