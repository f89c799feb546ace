// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/float8_cast.h"

#include <ATen/core/Tensor.h>

#include <vector>

// fp8 casts of weights that fused steps write (kernels/functors/float8_copy.h).
namespace fastamp::autocast {

/// Whether a weight can have such a cast: a float32 matrix in row-major order on the CPU or a CUDA
/// device, with kernels of ours for it, whose sizes are multiples of 16.
bool can_have_float8_copy(const at::Tensor& weight);

/// The weight's cast to float8_e4m3fn, its rows where a step can write them.
/// @param columns  Whether the transposed copy is wanted, too; refreshes then write it.
Float8Cast make_float8_copy(const at::Tensor& weight, bool columns);

/// Whether the rows of a cast are such as a step can write.
bool is_float8_copy(const Float8Cast& cast);

/// Whether nothing but `cast` refers to its memory: a graph whose backward is to run may.
bool is_unshared_float8_copy(const Float8Cast& cast);

struct SteppedFloat8Copy {
  const at::Tensor* weight;
  Float8Cast cast;
};

/// After a step over the weights, skipped or not: makes the casts those of the weights as they are
/// now. One launch for each device, on the step's stream; waits for none.
void refresh_float8_copies(const std::vector<SteppedFloat8Copy>& copies);

}  // namespace fastamp::autocast
