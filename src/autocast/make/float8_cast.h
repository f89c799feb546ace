// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

// Exported for tests.
namespace fastamp::autocast {

/// A matrix in fp8, in the layouts that the products of a linear layer read. Both copies hold the
/// same bytes. What was not wanted is undefined.
struct Float8Cast {
  at::Tensor rows;           ///< [M, K], row-major.
  at::Tensor columns;        ///< [K, M rounded up to 16], row-major: the transpose; padding is 0.
  at::Tensor inverse_scale;  ///< Without dimensions, float32: what a product is multiplied by.
  at::Tensor column_sums;    ///< [K], float32: sums of the elements as they were given.
};

struct Float8Wanted {
  bool rows = false;
  bool columns = false;
  bool column_sums = false;
};

/// Casts a matrix that is not empty, of dtype float32, bfloat16 or float16, to float8_e4m3fn or
/// float8_e5m2 with the power of two that brings its largest finite magnitude into the format's top
/// binade. Records nothing in autograd: call it with the autograd keys excluded.
///
/// On the CPU one kernel. Elsewhere, and where calls are intercepted, the same bytes by torch's ops
/// (column sums: but for the order in which sums of 16 rows are added, in double).
FASTAMP_API Float8Cast cast_to_float8(const at::Tensor& matrix, c10::ScalarType to,
                                      Float8Wanted wanted);

/// The same by torch's ops on any device.
FASTAMP_API Float8Cast cast_to_float8_by_ops(const at::Tensor& matrix, c10::ScalarType to,
                                             Float8Wanted wanted);

/// The columns of a cast by torch's ops, from its rows.
at::Tensor float8_columns(const at::Tensor& rows);

}  // namespace fastamp::autocast
