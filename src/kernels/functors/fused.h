// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/host_device.h"

namespace fastamp::kernels {

/// a * b + c rounded once. torch's CPU kernels use it where AVX2 is there, so our bits are theirs;
/// being explicit it gives the same bits on every device and instruction set.
FASTAMP_HOST_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

}  // namespace fastamp::kernels
