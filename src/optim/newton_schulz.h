// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fastamp::optim {

/// The quintic iteration x <- a x + (b g + c g g) x, g = x x', which brings all singular values of
/// a matrix near 1 without a decomposition.
struct NewtonSchulz {
  double a = 3.4445;
  double b = -4.7750;
  double c = 2.0315;
  double eps = 1e-7;  ///< The least norm that a matrix is divided by.
  std::int64_t steps = 5;
  c10::ScalarType dtype = c10::kBFloat16;

  friend bool operator==(const NewtonSchulz& left, const NewtonSchulz& right) {
    return left.a == right.a && left.b == right.b && left.c == right.c && left.eps == right.eps &&
           left.steps == right.steps && left.dtype == right.dtype;
  }
};

/// The dtype that matrices are handed over in: float16 has not the range of gradients, so these
/// are float32 until they are divided by their norms.
c10::ScalarType dtype_of_updates(const NewtonSchulz& iteration);

/// Runs the iteration on a batch of matrices, products of all of them at a time.
/// @param batch  [count, rows, columns], of dtype_of_updates(), with at least one matrix, each
///               dense. Overwritten.
/// @returns The same shape and order of strides, in the dtype of the iteration.
FASTAMP_API at::Tensor orthogonalized(const at::Tensor& batch, const NewtonSchulz& iteration);

}  // namespace fastamp::optim
