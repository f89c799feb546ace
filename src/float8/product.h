// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/float8_cast.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace fastamp::autocast {

/// A row-major matrix in fp8 with its inverse scale: one of the layouts of a Float8Cast.
struct Float8Matrix {
  const at::Tensor& data;
  const at::Tensor& inverse_scale;
};

inline Float8Matrix rows_of(const Float8Cast& cast) { return {cast.rows, cast.inverse_scale}; }
inline Float8Matrix columns_of(const Float8Cast& cast) {
  return {cast.columns, cast.inverse_scale};
}

/// A tensor of any rank as the rows of a matrix.
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape_symint({-1, tensor.sym_size(-1)});
}

/// a [M, K] times b [N, K] transposed, plus a bias of dtype `out`: summed in float32, rounded once.
///
/// The layouts are those that CUDA's kernels ask for; K and N are multiples of 16. Call it with the
/// keys of autograd and autocast excluded: the op has no derivative, and on the CPU calls others.
at::Tensor float8_product(Float8Matrix a, Float8Matrix b, const std::optional<at::Tensor>& bias,
                          c10::ScalarType out, bool fast_accumulate);

/// Whether this torch has an op that adds a product to a matrix, for whatever device: from 2.15 on.
bool has_float8_sums();

/// Adds that product to a matrix, within the op: summed in float32, rounded once to its dtype. Does
/// nothing where torch has no such op for the device, and to matrices that it does not take:
/// float32 or 16 bits, contiguous rows.
/// @return Whether it has been added.
bool add_float8_product(const at::Tensor& sum, Float8Matrix a, Float8Matrix b,
                        bool fast_accumulate);

}  // namespace fastamp::autocast
