// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/float8.h"

#include <cstddef>
#include <cstdint>

// fp8 copies of weights that a fused step writes: e4m3fn, in the order of the weight's elements.
//
// A step has to cast with a scale before it knows the range of the new weights. It takes the one
// that the copy has, and leaves the range in the copy's header. The refresh that follows on the
// same stream (Float8CopyRefresh) looks whether that range still asks for that scale. If so, the
// copy has the bits that a cast would have; if not, it is cast again from the weights. A step that
// is skipped leaves no range, and the refresh changes nothing.
namespace fastamp::kernels {

/// Lies in front of the first element of a copy.
struct alignas(16) Float8CopyHeader {
  float inverse_scale;       ///< Of the copy: a power of two.
  std::uint32_t amax;        ///< Of what a step has written since the last refresh: the bits of the
                             ///< largest finite magnitude, plus one; 0 if no step has.
  std::uint32_t not_finite;  ///< Not 0 if inf or NaN is among it.
  std::uint32_t unused;
};
inline constexpr std::size_t kFloat8HeaderBytes = sizeof(Float8CopyHeader);
static_assert(kFloat8HeaderBytes == 16);

FASTAMP_HOST_DEVICE Float8CopyHeader* float8_header(void* copy) {
  return static_cast<Float8CopyHeader*>(copy) - 1;
}

/// Computes what a refresh does, from the header that a step has left.
struct Float8CopyRefresh {
  bool has_step;   ///< Else nothing is to be done.
  bool stands;     ///< The copy holds what a cast would; a transposed copy is still out of date.
  bool is_finite;  ///< No element is inf or NaN.
  float scale;     ///< That a cast would have.

  FASTAMP_HOST_DEVICE explicit Float8CopyRefresh(const Float8CopyHeader& header)
      : has_step(header.amax != 0),
        is_finite(header.not_finite == 0),
        scale(float8_scale<c10::Float8_e4m3fn>(has_step ? header.amax - 1 : 0)) {
    stands = is_finite && bits_of(inverse_of_power_of_two(scale)) == bits_of(header.inverse_scale);
  }

  /// The header afterwards.
  FASTAMP_HOST_DEVICE Float8CopyHeader header() const {
    return {inverse_of_power_of_two(scale), 0, 0, 0};
  }
};

}  // namespace fastamp::kernels
