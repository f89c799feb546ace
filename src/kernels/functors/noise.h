// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stochastic rounding whose noise is a pure function of (element, step, parameter), in integers:
// the same bits on every device, for any threads and cuts, on all ranks that hold a replica, and
// after a resume. Nothing is drawn, so nothing can get out of step.

#include "kernels/functors/bits.h"
#include "kernels/functors/host_device.h"
#include "kernels/functors/step_count.h"

#include <cstddef>
#include <cstdint>

namespace fastamp::kernels {

/// A bijection in which every bit of x changes every bit of the result in about half of all cases.
/// Source: the constants were found by C. Wellons (hash-prospector, "lowbias32", public domain).
FASTAMP_HOST_DEVICE std::uint32_t mix32(std::uint32_t x) {
  x ^= x >> 16U;
  x *= 0x7feb352dU;
  x ^= x >> 15U;
  x *= 0x846ca68bU;
  return x ^ (x >> 16U);
}

/// Identifies a parameter and the first of its elements that a tensor holds, in one number, which
/// is not negative.
/// @param parameter  Its position among all parameters of the optimizer.
/// @param first      0, or for a shard the index of its first element in the whole parameter.
///                   Counted modulo 2^32: elements that far apart share their noise.
constexpr std::int64_t noise_origin(std::size_t parameter, std::uint64_t first = 0) {
  return static_cast<std::int64_t>((static_cast<std::uint64_t>(parameter) & 0x7fffffffU) << 32U |
                                   (first & 0xffffffffU));
}

/// The noise of one tensor in one step: a stretch of a row of 2^32 numbers, which begins elsewhere
/// for each parameter and step.
struct Noise {
  std::uint32_t start;  ///< Of the tensor's first element.

  /// @param count  Of the steps that the tensor has seen: only a step that happens changes the
  ///               noise.
  static FASTAMP_HOST_DEVICE Noise at(std::uint64_t origin, float count) {
    // 0x9e3779b9: mix32 leaves 0 as it is.
    const std::uint32_t parameter = mix32(static_cast<std::uint32_t>(origin >> 32U) + 0x9e3779b9U);
    return {mix32(parameter + steps_of(count)) + static_cast<std::uint32_t>(origin)};
  }

  /// Evenly distributed in [0, 2^16), for element `index` of the tensor.
  FASTAMP_HOST_DEVICE std::uint32_t operator()(std::uint32_t index) const {
    return bits(index) & 0xffffU;
  }

  /// Noise of the m-th moment of an element: the first one has other bits than the others.
  FASTAMP_HOST_DEVICE std::uint32_t of_moment(std::uint32_t index, std::size_t m) const {
    return (bits(index) >> (m == 0 ? 16U : 0U)) & 0xffffU;
  }

  /// The bits that these are taken from: for what needs more of them.
  FASTAMP_HOST_DEVICE std::uint32_t bits(std::uint32_t index) const { return mix32(start + index); }
};

/// Order in which the elements of a tensor, which are numbered row by row, lie in memory: in this
/// order; or matrices of rows x columns column by column, one behind the other, as channels that
/// come last, or a matrix that was transposed.
struct ElementOrder {
  std::uint32_t rows = 0;  ///< 0: in the order of the elements.
  std::uint32_t columns = 0;

  FASTAMP_HOST_DEVICE bool turns() const { return rows != 0; }

  /// The number, modulo 2^32, of the element at a place in memory.
  FASTAMP_HOST_DEVICE std::uint32_t element_at(std::uint64_t place) const {
    const std::uint64_t matrix = static_cast<std::uint64_t>(rows) * columns;
    std::uint32_t row = 0;
    std::uint32_t column = 0;
    if (((place | matrix) >> 32U) == 0) {  // Divisions of 64 bits take several times as long.
      const auto inside = static_cast<std::uint32_t>(place) % static_cast<std::uint32_t>(matrix);
      column = inside / rows;
      row = inside % rows;
    } else {
      const std::uint64_t inside = place % matrix;
      column = static_cast<std::uint32_t>(inside / rows);
      row = static_cast<std::uint32_t>(inside % rows);
    }
    return static_cast<std::uint32_t>(place) - (column * rows + row) + (row * columns + column);
  }

  /// Packs it into one word, of which a table of pointers holds any.
  std::uint64_t packed() const { return static_cast<std::uint64_t>(rows) << 32U | columns; }
  static FASTAMP_HOST_DEVICE ElementOrder of_packed(std::uint64_t word) {
    return {static_cast<std::uint32_t>(word >> 32U), static_cast<std::uint32_t>(word)};
  }
};

/// The bits of one of the two bfloat16 around a value, the upper one with the probability that
/// makes the mean over all noise the value. A value that bfloat16 has stays, inf and -0 included; a
/// NaN becomes the canonical one. Beyond the largest finite bfloat16 the upper neighbour is inf.
/// With the same noise a larger value never becomes a smaller one.
FASTAMP_HOST_DEVICE std::uint16_t round_stochastically(float value, std::uint32_t noise) {
  const std::uint32_t bits = bits_of(value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return static_cast<std::uint16_t>(is_nan ? 0x7fc0U : (bits + noise) >> 16U);
}

}  // namespace fastamp::kernels
