#pragma once

#include "kernels/host_array.h"

#include <cstddef>

namespace fastamp::kernels::cpu {

/// Adds the squares of the arrays from `first` on to `total`, one sum after the other, and unless
/// inv_scale is 1 multiplies each by it: as long as they have an address and are fp32, shorter than
/// a chunk and finite.
/// Returns the place of the first array that is not, of which nothing was added or written, or the
/// number of arrays.
///
/// Does what a visit of one chunk does, many times a call: of 16 elements the call, the saved
/// registers and the choice of dtype are as much work as the numbers.
using SmallArraysFn = std::size_t(KnownArrays arrays, std::size_t first, float inv_scale,
                                  double& total);
SmallArraysFn* small_arrays_function();

}  // namespace fastamp::kernels::cpu
