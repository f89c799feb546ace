// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fastamp::kernels::cpu {

/// Whether cast_contiguous knows the pair: float32 and a 16-bit dtype, either way.
bool can_cast(c10::ScalarType from, c10::ScalarType to);

/// Converts n elements that lie densely in memory, on the calling thread.
void cast_contiguous(const void* in, c10::ScalarType from, void* out, c10::ScalarType to,
                     std::int64_t n);

}  // namespace fastamp::kernels::cpu
