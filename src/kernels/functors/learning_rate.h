// SPDX-License-Identifier: Apache-2.0
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

}  // namespace fastamp::kernels
