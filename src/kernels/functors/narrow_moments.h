// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"

namespace fastamp::kernels {

/// Whether first moments and momentum buffers that are stored narrowly, in bfloat16 or 8 bits, are
/// rounded by noise. To nearest, one stays where it is as soon as a step would move it by less than
/// half a unit: short of steady gradients by 2^-9 to 2^-8 of it over `moves` in bfloat16, so by 6 %
/// at most with this bound. When gradients have gone, codes of 8 bits would not move at all below
/// it. Above it noise would only add to the error.
/// @param moves  The part of the moment that a step takes away: 1 - beta1, or 1 - momentum.
FASTAMP_HOST_DEVICE bool first_moments_need_noise(float moves) { return moves < 0.0625F; }

}  // namespace fastamp::kernels
