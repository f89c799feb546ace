#pragma once

#include "kernels/functors/host_device.h"
#include "kernels/functors/unscale.h"

#include <cstdint>

namespace fastamp::kernels {

/// Elements whose squares are summed on their own before the sums of such chunks are added, chunk
/// after chunk. The cut depends on a tensor's size alone, so the order of all sums does too.
inline constexpr std::int64_t kNormChunkNumel = 2048;

/// The square of a gradient element, exact in fp64 for every fp32 number (48 bits, and an exponent
/// range that neither overflows nor underflows), so contraction to a fused multiply-add changes no
/// bit. The scale is applied once, to the sum. The sum of finite squares is finite for any number
/// of elements there can be: a non-finite sum tells of a non-finite element.
FASTAMP_HOST_DEVICE double square(float grad) {
  const auto wide = static_cast<double>(grad);
  return wide * wide;
}

/// Sum of squares of unscaled gradients from that of the scaled ones.
FASTAMP_HOST_DEVICE double unscaled_sum_of_squares(double sum, float inv_scale) {
  const auto factor = static_cast<double>(inv_scale);
  return sum * (factor * factor);
}

}  // namespace fastamp::kernels
