// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/host_array.h"

#include <cstddef>

namespace fastamp::kernels::cpu {

/// Adds the squares of the arrays from `first` on to `total`, one sum after the other, and
/// multiplies each array by a factor unless that is 1. Stops at the first array that has no
/// address, is not fp32, is not shorter than a chunk or has a sum that is not below the bound
/// (safe_squares()).
/// Returns the place of that array, of which nothing was added or written, or the number of arrays.
///
/// Does the work of visiting chunks one by one in a single call: for 16 elements the call, the
/// saved registers and the choice of dtype are as much work as the numbers.
using SmallArraysFn = std::size_t(KnownArrays arrays, std::size_t first, float factor, double bound,
                                  double& total);
SmallArraysFn* small_arrays_function();

}  // namespace fastamp::kernels::cpu
