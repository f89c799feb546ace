// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

namespace fastamp::kernels {

/// |value| as an integer that orders like it; inf and NaN come last, from kInfBits up. Bits,
/// because a program built with -ffast-math may fold isfinite() to `true`. The greatest magnitude
/// of an array shows whether all of it is finite, and costs two vector instructions per vector.
FASTAMP_HOST_DEVICE std::uint32_t magnitude_bits(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffU;
}

FASTAMP_HOST_DEVICE std::uint64_t magnitude_bits(double value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffffffffffU;
}

template <typename opmath_t>
inline constexpr auto kInfBits = std::uint32_t{0x7f800000U};
template <>
inline constexpr auto kInfBits<double> = std::uint64_t{0x7ff0000000000000U};

/// True for inf and NaN.
template <typename opmath_t>
FASTAMP_HOST_DEVICE bool is_non_finite(opmath_t value) {
  return magnitude_bits(value) >= kInfBits<opmath_t>;
}

/// Least magnitude of a result that is inf or NaN once it is rounded to scalar_t.
template <typename scalar_t>
inline constexpr auto kOverflowBits = kInfBits<scalar_t>;
template <>
inline constexpr auto kOverflowBits<c10::Half> = std::uint32_t{0x477ff000U};  // 65520
template <>
inline constexpr auto kOverflowBits<c10::BFloat16> = std::uint32_t{0x7f7f8000U};

/// Counts: how many elements of some gradient are inf and NaN, or become so when they are unscaled.
struct NonFinite {
  std::int64_t inf = 0;
  std::int64_t nan = 0;

  /// A finite element with a product that is not counts as inf.
  /// @param overflows  Whether the product is not finite; true for every NaN.
  template <typename opmath_t>
  FASTAMP_HOST_DEVICE void count(opmath_t grad, bool overflows) {
    const bool is_nan = magnitude_bits(grad) > kInfBits<opmath_t>;
    inf += overflows && !is_nan ? 1 : 0;
    nan += is_nan ? 1 : 0;
  }
};

/// One gradient element, in the type the arithmetic runs in: float for fp16, bf16 and fp32
/// gradients (rounded to nearest even when stored), double for fp64.
template <typename opmath_t>
struct Unscale {
  opmath_t inv_scale;  ///< 1 / loss scale; always comes from an fp32 tensor.

  /// Test: with an inverse scale of 1 the stored bits would not change, so callers skip the store.
  FASTAMP_HOST_DEVICE bool rewrites() const { return inv_scale != opmath_t{1}; }

  FASTAMP_HOST_DEVICE opmath_t operator()(opmath_t grad) const { return grad * inv_scale; }
};

}  // namespace fastamp::kernels
