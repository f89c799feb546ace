// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masters in two bytes: what a 16-bit parameter lacks of its fp32 master is at most half a unit of
// the parameter, and fits an int16. The parameter is always its master rounded to nearest even.
//
// bfloat16: the remainder is the difference of the bits, so in units of the master's last place.
// Exact but for one tie: where the parameter has an even last bit and the master lies half a unit
// above it in magnitude, the remainder would be 2^15. That is one of 131 072 masters, and it comes
// back one unit of fp32 nearer to zero. (No code is exact: an even parameter has 65 537 masters.)
// float16: the remainder counts units of the parameter / 2^16. Exact for every master of at least
// 2^-14, float16's smallest normal, also where the count saturates: the sum with the parameter is
// rounded to fp32, whose units there are 8 of these. Below 2^-14 the error is at most 2^-40.
// A parameter that is inf or NaN has no remainder, and is its own master.
//
// A remainder that is not the parameter's (somebody has written the parameter) is worth at most
// half a unit of it. Source of the idea: Transformer Engine's "master parameter remainder", whose
// parameters are rounded away from zero at ties; bits and proof here are our own.

#include "kernels/functors/bits.h"
#include "kernels/functors/host_device.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace fastamp::kernels {

/// Remainders of parameters of type Half. Parameters are given widened to fp32, which is exact.
template <typename Half>
struct Remainder;

template <>
struct Remainder<c10::BFloat16> {
  /// @param rounded  `master` in bfloat16.
  static FASTAMP_HOST_DEVICE std::int32_t of(float master, float rounded) {
    const auto gap = static_cast<std::int32_t>(bits_of(master) - bits_of(rounded));
    const std::int32_t held = gap > 0x7fff ? 0x7fff : gap;
    return (bits_of(rounded) & 0x7fffffffU) < 0x7f800000U ? held : 0;
  }

  static FASTAMP_HOST_DEVICE float master(float param, std::int32_t remainder) {
    const std::uint32_t bits = bits_of(param);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    // Below a zero there is nothing: a parameter set to zero keeps a negative remainder.
    const bool counts = magnitude < 0x7f800000U && (magnitude != 0 || remainder > 0);
    return from_bits(counts ? bits + static_cast<std::uint32_t>(remainder) : bits);
  }
};

template <>
struct Remainder<c10::Half> {
  /// @param rounded  `master` in float16.
  static FASTAMP_HOST_DEVICE std::int32_t of(float master, float rounded) {
    const std::uint32_t exponent = exponent_of(rounded);
    // Exact: the difference of neighbours, and its product with a power of two.
    const float count = (master - rounded) * from_bits((280U - exponent) << 23U);
    // Adding 1.5 * 2^23 rounds to an integer, to nearest even.
    const float whole = (count + 12582912.0F) - 12582912.0F;
    // -2^15 would be a tie, which may round to the parameter's neighbour.
    const float below = whole > 32767.0F ? 32767.0F : whole;
    const float held = below < -32767.0F ? -32767.0F : below;
    return exponent < 255U && held == held ? static_cast<std::int32_t>(held) : 0;
  }

  static FASTAMP_HOST_DEVICE float master(float param, std::int32_t remainder) {
    const std::uint32_t exponent = exponent_of(param);
    const float part = static_cast<float>(remainder) * from_bits((exponent - 26U) << 23U);
    return remainder != 0 && exponent < 255U ? param + part : param;  // -0 + 0 would be 0.
  }

 private:
  /// Biased by 127, and at least that of float16's smallest normal, whose unit subnormals share.
  static FASTAMP_HOST_DEVICE std::uint32_t exponent_of(float value) {
    const std::uint32_t exponent = (bits_of(value) & 0x7fffffffU) >> 23U;
    return exponent < 113U ? 113U : exponent;  // So a remainder counts 2^(exponent - 153).
  }
};

}  // namespace fastamp::kernels
