// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/float8_interface.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

// Casts to fp8, and those that fused steps write (kernels/functors/float8_copy.h). Exported for
// tests.
namespace fastamp::autocast {

/// A matrix in fp8, in the layouts that the products of a linear layer read. Both copies hold the
/// same bytes. What was not wanted is undefined.
struct Float8Cast {
  at::Tensor rows;           ///< [M, K], row-major.
  at::Tensor columns;        ///< [K, M rounded up to 16], row-major: the transpose; padding is 0.
  at::Tensor inverse_scale;  ///< Without dimensions, float32: what a product is multiplied by.
  at::Tensor column_sums;    ///< [K], float32: sums of the elements as they were given.
};

/// Casts a matrix that is not empty, of dtype float32, bfloat16 or float16, to float8_e4m3fn or
/// float8_e5m2 with the power of two that brings its largest finite magnitude into the format's top
/// binade. Records nothing in autograd: call it with the autograd keys excluded.
///
/// By kernels of our own on the CPU and on CUDA, the same bits on both; waits for no device. The
/// same bytes by torch's ops where calls are intercepted and elsewhere (column sums: but for the
/// order in which sums of 16 rows are added, in double).
FASTAMP_API Float8Cast cast_to_float8(const at::Tensor& matrix, c10::ScalarType to,
                                      Float8Wanted wanted);

/// The largest finite magnitude of a tensor of such a dtype, which decides its scale: float32,
/// without dimensions; 0 if there is none. As cast_to_float8() otherwise.
FASTAMP_API at::Tensor float8_amax(const at::Tensor& tensor);

/// The cast of a part of a larger tensor, with the scale of the whole: `amax` is the whole's
/// float8_amax(). On CUDA by torch's ops, since the kernel there finds the range of what it casts.
FASTAMP_API Float8Cast cast_part_to_float8(const at::Tensor& matrix, const at::Tensor& amax,
                                           c10::ScalarType to, Float8Wanted wanted);

/// A matrix to be cast, and what is wanted of it.
struct Float8CastRequest {
  at::Tensor matrix;
  Float8Wanted wanted;
};

/// Casts matrices of one device as cast_to_float8() does each, on CUDA by one pair of launches for
/// all of them (and one more for each whose column sums are wanted).
FASTAMP_API std::vector<Float8Cast> cast_all_to_float8(
    const std::vector<Float8CastRequest>& requests, c10::ScalarType to);

/// Does what cast_to_float8() does by torch's ops on any device.
FASTAMP_API Float8Cast cast_to_float8_by_ops(const at::Tensor& matrix, c10::ScalarType to,
                                             Float8Wanted wanted);

/// The columns of a cast by torch's ops, from its rows.
at::Tensor float8_columns(const at::Tensor& rows);

/// Whether a weight can have a cast that steps write: a float32 matrix in row-major order, on the
/// CPU or a CUDA device for which fastamp has kernels, whose sizes are multiples of 16.
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
