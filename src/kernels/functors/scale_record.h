// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"
#include "kernels/functors/update_scale.h"

#include <cstdint>
#include <limits>

namespace fastamp::kernels {

/// A ring of the last steps, in device memory; rows of kColumns floats.
struct ScaleHistory {
  static constexpr std::int64_t kColumns = 4;

  float* rows;  ///< Null: no history.
  std::int64_t capacity;
  std::int64_t* count;  ///< Rows ever written.
  const float* norm;    ///< Of the gradients; both null: not known.
  const double* precise_norm;

  FASTAMP_HOST_DEVICE void append(float scale, float found_inf, std::int32_t growth_tracker) const {
    if (rows == nullptr) {
      return;
    }
    // Unsigned, so that any count a user may have loaded finds a row.
    const auto index = static_cast<std::uint64_t>(*count) % static_cast<std::uint64_t>(capacity);
    float* row = rows + static_cast<std::int64_t>(index) * kColumns;
    row[0] = scale;
    row[1] = found_inf != 0.0F ? 1.0F : 0.0F;
    row[2] = norm_value();
    row[3] = static_cast<float>(growth_tracker);
    *count += 1;
  }

 private:
  FASTAMP_HOST_DEVICE float norm_value() const {
    if (norm != nullptr) {
      return *norm;
    }
    return precise_norm != nullptr ? static_cast<float>(*precise_norm)
                                   : std::numeric_limits<float>::quiet_NaN();
  }
};

/// All of a call of fastamp::ops::update_scale_: one thread's work on the host or on the device.
struct ScaleUpdate {
  UpdateScale rule;
  float* scale;
  std::int32_t* growth_tracker;
  std::int32_t* hysteresis_tracker;  ///< Null: a hysteresis of 1.
  const float* found_inf;
  float* inv_scale;  ///< Null: not asked for.
  ScaleHistory history;
  const float* new_scale = nullptr;    ///< Null: the rule decides. Else the trackers stay.
  float* fast_growth_limit = nullptr;  ///< Null: growth is never fast.

  FASTAMP_HOST_DEVICE void operator()() const {
    const float used = *scale;
    if (new_scale != nullptr) {
      *scale = *new_scale;
    } else {
      rule(*scale, *growth_tracker, hysteresis_tracker, *found_inf, fast_growth_limit);
    }
    if (inv_scale != nullptr) {
      // In fp64 and rounded once, as torch.amp's unscale_ takes it.
      *inv_scale = static_cast<float>(1.0 / static_cast<double>(*scale));
    }
    history.append(used, *found_inf, *growth_tracker);
  }
};

}  // namespace fastamp::kernels
