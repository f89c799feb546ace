// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"
#include "kernels/functors/unscale.h"

namespace fastamp::kernels {

/// Values: what a fused step does to a gradient before its optimizer sees it, if it happens.
struct AmpStepValues {
  float inv_scale;
  float clip_coef;
  float clip_value;  ///< Infinite: no clamping.
  bool skip;

  /// torch's order: unscale_ rounds to fp32, then clipping by norm does; a NaN is not clamped.
  FASTAMP_HOST_DEVICE float operator()(float grad) const {
    const float clipped = grad * inv_scale * clip_coef;
    const float below = clipped > clip_value ? clip_value : clipped;
    return below < -clip_value ? -clip_value : below;
  }
  FASTAMP_HOST_DEVICE bool rewrites() const {
    return inv_scale != 1.0F || clip_coef != 1.0F || !is_non_finite(clip_value);
  }
};

/// Addresses of the AmpStep of a call, to be read when the step runs. Null pointers stand for 1, 1
/// and 0.
struct AmpStepPointers {
  const float* inv_scale;
  const float* clip_coef;
  const float* found_inf;
  float clip_value;
  bool write_grads;

  /// `!= 0` is true for NaN, and for 2 of summed flags. A factor that is inf or NaN skips the step
  /// too: it would make all weights so.
  FASTAMP_HOST_DEVICE AmpStepValues read() const {
    const float inverse = inv_scale == nullptr ? 1.0F : *inv_scale;
    const float coefficient = clip_coef == nullptr ? 1.0F : *clip_coef;
    const bool flagged = found_inf != nullptr && *found_inf != 0.0F;
    return {inverse, coefficient, clip_value,
            flagged || is_non_finite(inverse) || is_non_finite(coefficient)};
  }
};

}  // namespace fastamp::kernels
