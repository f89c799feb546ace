// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"
#include "kernels/functors/unscale.h"

#include <cmath>
#include <cstdint>
#include <limits>

namespace fastamp::kernels {

/// Elements whose squares are summed on their own before the sums of such chunks are added, chunk
/// after chunk. The cut depends on a tensor's size alone, so the order of all sums does too.
inline constexpr std::int64_t kNormChunkNumel = 2048;

/// The square of a gradient element, exact in fp64 for every fp32 number (48 bits, and an exponent
/// range that neither overflows nor underflows), so contraction to a fused multiply-add changes no
/// bit. The scale is applied once, to the sum. The sum of finite squares is finite for any number
/// of elements there can be: a non-finite sum means a non-finite element.
FASTAMP_HOST_DEVICE double square(float grad) {
  const auto wide = static_cast<double>(grad);
  return wide * wide;
}

/// fp64 gradients are squared as they are: beyond 1e154 a finite one overflows.
FASTAMP_HOST_DEVICE double square(double grad) { return grad * grad; }

/// Sum of squares of unscaled gradients from that of the scaled ones.
FASTAMP_HOST_DEVICE double unscaled_sum_of_squares(double sum, float inv_scale) {
  const auto factor = static_cast<double>(inv_scale);
  return sum * (factor * factor);
}

/// A bound of the sum of squares of some elements below which all their products with inv_scale are
/// finite: what is written is checked without a look at each. Infinite for factors that make no
/// finite element infinite, 0 for those that make all so.
/// @param greatest  A power of two at most half of the greatest product.
FASTAMP_HOST_DEVICE double safe_squares(float inv_scale, double greatest = 0x1p127) {
  if (is_non_finite(inv_scale)) {
    return 0.0;
  }
  const double factor = static_cast<double>(inv_scale) * static_cast<double>(inv_scale);
  return factor <= 1.0 ? std::numeric_limits<double>::infinity() : greatest * greatest / factor;
}

/// Whether a sum of squares is below such a bound; no NaN is.
FASTAMP_HOST_DEVICE bool is_safe(double squares, double bound) {
  return magnitude_bits(squares) < magnitude_bits(bound);
}

/// The factor that torch.nn.utils.clip_grad_norm_ multiplies gradients by, in its arithmetic: its
/// quotient is a reciprocal and a product, and NaN stays.
FASTAMP_HOST_DEVICE float clip_coefficient(float max_norm, float total_norm) {
  const float coefficient = 1.0F / (total_norm + 1e-6F) * max_norm;
  return coefficient > 1.0F ? 1.0F : coefficient;
}

/// Places where a pass over gradients writes their norm; null pointers: not requested.
struct NormResults {
  double* sum_of_squares;
  float* total_norm;
  float* clip_coef;
  float max_norm;  ///< For clip_coef.

  /// `sum` is that of the squares of the scaled gradients.
  /// @returns whether the factor is one that gradients may be multiplied by.
  FASTAMP_HOST_DEVICE bool write(double sum, float inv_scale) const {
    const double unscaled = unscaled_sum_of_squares(sum, inv_scale);
    const auto norm = static_cast<float>(std::sqrt(unscaled));
    if (sum_of_squares != nullptr) {
      *sum_of_squares = unscaled;
    }
    if (total_norm != nullptr) {
      *total_norm = norm;
    }
    if (clip_coef == nullptr) {
      return true;
    }
    *clip_coef = clip_coefficient(max_norm, norm);
    return !is_non_finite(*clip_coef);
  }
};

}  // namespace fastamp::kernels
