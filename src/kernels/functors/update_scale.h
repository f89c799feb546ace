// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"
#include "kernels/functors/unscale.h"

#include <cstdint>

namespace fastamp::kernels {

/// The rule of fastamp::ops::update_scale_, one thread's work on the host or on the device.
struct UpdateScale {
  double growth_factor;
  double backoff_factor;
  std::int64_t growth_interval;
  std::int32_t hysteresis;
  bool has_min;
  bool has_max;
  float min_scale;
  float max_scale;
  std::int64_t fast_growth_interval = 0;  ///< Not used without a limit.

  /// Applies one step. `hysteresis_tracker` may be null, which means a hysteresis of 1, and
  /// `fast_growth_limit`, which means that growth is never fast.
  /// The products are taken in fp64 and rounded once to fp32, as torch's are.
  FASTAMP_HOST_DEVICE void operator()(float& scale, std::int32_t& growth_tracker,
                                      std::int32_t* hysteresis_tracker, float found_inf,
                                      float* fast_growth_limit = nullptr) const {
    // `!= 0` is true for NaN, and for 2 where ranks summed their flags.
    if (found_inf != 0.0F) {
      growth_tracker = 0;
      if (exhausted(hysteresis_tracker)) {
        scale = static_cast<float>(scale * backoff_factor);
        note_fall(bounded(scale), fast_growth_limit);
      }
    } else {
      grow(scale, growth_tracker, fast_growth_limit);
      if (hysteresis_tracker != nullptr) {
        *hysteresis_tracker = hysteresis;
      }
    }
    scale = bounded(scale);
  }

 private:
  static FASTAMP_HOST_DEVICE bool exhausted(std::int32_t* tracker) {
    if (tracker == nullptr) {
      return true;
    }
    if (*tracker > 0) {
      *tracker -= 1;
    }
    return *tracker <= 0;
  }

  /// NaN stays NaN.
  FASTAMP_HOST_DEVICE float bounded(float scale) const {
    if (has_min && scale < min_scale) {
      scale = min_scale;
    }
    if (has_max && scale > max_scale) {
      scale = max_scale;
    }
    return scale;
  }

  // The limit of fast growth is negative from a fall until the next growth: falls in between belong
  // to the same collapse, and only the first of them says where the scale had been good.

  static FASTAMP_HOST_DEVICE void note_fall(float scale, float* limit) {
    if (limit != nullptr && !(*limit < 0.0F)) {
      *limit = -scale;
    }
  }

  FASTAMP_HOST_DEVICE bool is_due(std::int32_t clean_steps, float grown, const float* limit) const {
    if (clean_steps == growth_interval) {
      return true;
    }
    if (limit == nullptr || clean_steps < fast_growth_interval) {
      return false;
    }
    return grown <= (*limit < 0.0F ? -*limit : *limit);
  }

  FASTAMP_HOST_DEVICE void grow(float& scale, std::int32_t& growth_tracker, float* limit) const {
    // Unsigned, so that a tracker at its maximum wraps instead of being undefined.
    const auto clean_steps =
        static_cast<std::int32_t>(static_cast<std::uint32_t>(growth_tracker) + 1U);
    const auto grown = static_cast<float>(scale * growth_factor);
    if (!is_due(clean_steps, grown, limit)) {
      growth_tracker = clean_steps;
      return;
    }
    growth_tracker = 0;
    if (!is_non_finite(grown)) {
      scale = grown;
    }
    if (limit != nullptr && *limit < 0.0F) {
      *limit = -*limit;
    }
  }
};

}  // namespace fastamp::kernels
