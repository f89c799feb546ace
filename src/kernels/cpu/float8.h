// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/float8.h"

#include <fastamp/macros.h>

#include <c10/core/ScalarType.h>

#include <cstdint>

// Casts to fp8 with one scale per tensor. Exported for tests.
namespace fastamp::kernels::cpu {

/// Result of one read of a tensor.
struct Float8Range {
  std::uint32_t amax;  ///< The largest finite magnitude, as the bits of a float32.
  bool is_finite;      ///< Whether no element is inf or NaN.
};

/// @param from  float32, bfloat16 or float16, as below.
FASTAMP_API Float8Range float8_range(const void* in, c10::ScalarType from, std::int64_t n);

/// The exponent field of the scale for a tensor of this range.
FASTAMP_API std::uint32_t float8_exponent_for(Float8Range range, c10::ScalarType to);

/// A matrix of rows x columns that lies densely row by row, and where its casts go: null pointers
/// are left out.
struct Float8CastArgs {
  const void* in;
  c10::ScalarType from;
  c10::ScalarType to;  ///< float8_e4m3fn or float8_e5m2.
  std::int64_t rows;
  std::int64_t columns;
  Float8Range range;
  std::uint32_t exponent;  ///< Field of the scale: float8_exponent_for().
  void* row_major;         ///< [rows, columns]
  void* transposed;        ///< [columns, padded_rows]; the padding is filled with zeros.
  std::int64_t padded_rows;
  float* column_sums;  ///< [columns]: sums of the elements as they were given.
};

/// Writes the casts and returns 1 / scale.
FASTAMP_API float float8_cast(const Float8CastArgs& args);

/// A dense float32 matrix whose fp8 copy a fused step has written. Sizes are multiples of 16.
struct Float8CopyArgs {
  const void* weight;
  std::int64_t rows;
  std::int64_t columns;
  void* copy;        ///< [rows, columns], behind a header (functors/float8_copy.h).
  void* transposed;  ///< [columns, rows], or null.
};

/// Makes the copy what a cast of the weight would be.
FASTAMP_API void refresh_float8_copy(const Float8CopyArgs& args);

}  // namespace fastamp::kernels::cpu
