// SPDX-License-Identifier: Apache-2.0
#pragma once

// Casts of matrices to fp8: what goes in and comes out, and the CPU kernel's.

#include "cuda_on_cpu/tensors.h"
#include "kernels/cpu/float8.h"
#include "kernels/cuda/float8.h"

#include <cstdint>
#include <vector>

namespace fastamp::test {

struct Wanted {
  bool rows = true;
  bool columns = true;
  bool sums = true;
};

/// What is cast: a matrix of a given size in a flat tensor, which may start anywhere.
struct Matrix {
  at::Tensor in;
  std::int64_t rows;
  std::int64_t columns;
  at::ScalarType to;
};

/// Outputs of a cast; what was not wanted is undefined.
struct Outputs {
  at::Tensor row_major;
  at::Tensor transposed;
  at::Tensor sums;
  at::Tensor inverse_scale;

  Outputs(const Matrix& matrix, Wanted wanted);
  std::vector<at::Tensor> all() const;
};

Outputs cast_on_cpu(const Matrix& matrix, Wanted wanted);

kernels::cuda::Float8CastEntry entry_of(const Matrix& matrix, const Outputs& out);

/// Compares what both have, bit by bit.
void check_outputs(const Outputs& on_cuda, const Outputs& expected);

}  // namespace fastamp::test
