// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"

namespace fastamp::kernels {

/// The fp32 weight of a 16-bit parameter: its master, unless the parameter is no longer what the
/// master rounds to. Then the parameter has been written since the last step (loaded, clamped,
/// averaged), and is the weight. `rounded` and `param` are exact in fp32.
FASTAMP_HOST_DEVICE float current_weight(float master, float rounded, float param) {
  return rounded == param ? master : param;
}

}  // namespace fastamp::kernels
