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

  /// Applies one step. `hysteresis_tracker` may be null, which means a hysteresis of 1.
  /// The products are taken in fp64 and rounded once to fp32, as torch's are.
  FASTAMP_HOST_DEVICE void operator()(float& scale, std::int32_t& growth_tracker,
                                      std::int32_t* hysteresis_tracker, float found_inf) const {
    // `!= 0` is true for NaN, and for 2 where ranks summed their flags.
    if (found_inf != 0.0F) {
      growth_tracker = 0;
      if (exhausted(hysteresis_tracker)) {
        scale = static_cast<float>(scale * backoff_factor);
      }
    } else {
      grow(scale, growth_tracker);
      if (hysteresis_tracker != nullptr) {
        *hysteresis_tracker = hysteresis;
      }
    }
    if (has_min && scale < min_scale) {
      scale = min_scale;
    }
    if (has_max && scale > max_scale) {
      scale = max_scale;
    }
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

  FASTAMP_HOST_DEVICE void grow(float& scale, std::int32_t& growth_tracker) const {
    // Unsigned, so that a tracker at its maximum wraps instead of being undefined.
    const auto clean_steps =
        static_cast<std::int32_t>(static_cast<std::uint32_t>(growth_tracker) + 1U);
    if (clean_steps != growth_interval) {
      growth_tracker = clean_steps;
      return;
    }
    growth_tracker = 0;
    const auto grown = static_cast<float>(scale * growth_factor);
    if (!is_non_finite(grown)) {
      scale = grown;
    }
  }
};

}  // namespace fastamp::kernels
