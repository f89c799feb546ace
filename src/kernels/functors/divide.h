// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/fused.h"
#include "kernels/functors/host_device.h"

namespace fastamp::kernels {

/// x / divisor, correctly rounded, from the correctly rounded reciprocal of the divisor: the first
/// quotient is near, its remainder is exact in one fused operation, and so is the last rounding
/// (Markstein's theorem). Four operations without the branch that a division on a GPU takes for
/// rare operands. x must be 0, infinite, NaN or from 2^-80 up, the divisor 0 or from 2^-40 to 1:
/// then nothing underflows.
FASTAMP_HOST_DEVICE float divide(float x, float divisor, float reciprocal) {
  const float quotient = x * reciprocal;
  const float remainder = fused(-quotient, divisor, x);
  const float corrected = fused(remainder, reciprocal, quotient);
  return remainder == remainder ? corrected : quotient;  // infinities have no remainder
}

}  // namespace fastamp::kernels
