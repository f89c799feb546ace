#pragma once

#include "kernels/functors/host_device.h"

namespace fastamp::kernels {

/// A number, or where to read one when the step runs: schedulers act on captured graphs that way.
struct LearningRate {
  double number;
  const float* single;    ///< Wins over `number` if not null.
  const double* precise;  ///< The same, of a float64 tensor.

  FASTAMP_HOST_DEVICE double value() const {
    if (single != nullptr) {
      return static_cast<double>(*single);
    }
    return precise != nullptr ? *precise : number;
  }
};

/// What is done to a gradient before any optimizer sees it, and whether the step happens.
struct StepGate {
  float inv_scale;
  float clip_coef;
  bool skip;

  /// torch's order: unscale_ rounds to fp32, then clipping does.
  FASTAMP_HOST_DEVICE float operator()(float grad) const { return grad * inv_scale * clip_coef; }
  FASTAMP_HOST_DEVICE bool rewrites() const { return inv_scale != 1.0F || clip_coef != 1.0F; }

  /// Null pointers stand for 1, 1 and 0. `!= 0` is true for NaN, and for 2 of summed flags.
  static FASTAMP_HOST_DEVICE StepGate read(const float* inv_scale, const float* clip_coef,
                                           const float* found_inf) {
    return {inv_scale == nullptr ? 1.0F : *inv_scale, clip_coef == nullptr ? 1.0F : *clip_coef,
            found_inf != nullptr && *found_inf != 0.0F};
  }
};

}  // namespace fastamp::kernels
