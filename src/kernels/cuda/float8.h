// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace fastamp::kernels::cuda {

/// A matrix of rows x columns that lies densely row by row, and where its casts go. Null pointers
/// are left out. Addresses are on the device; those of the casts are multiples of 16.
struct Float8CastEntry {
  const void* in;
  c10::ScalarType from;  ///< float32, bfloat16 or float16.
  c10::ScalarType to;    ///< float8_e4m3fn or float8_e5m2.
  std::int64_t rows;
  std::int64_t columns;
  void* row_major;       ///< [rows, columns]
  void* transposed;      ///< [columns, rows rounded up to 16]; the padding is filled with zeros.
  float* column_sums;    ///< [columns]: sums of the elements as they were given.
  float* inverse_scale;  ///< Never null.
};

/// Casts matrices, each with a scale of its own, on the current stream of a device: two launches
/// for all of them, one more for each with column sums, and under graph capture those that write
/// tables which do not fit a kernel's arguments. Does not wait for the device.
///
/// @throws c10::ValueError  for 2^32 tiles of 64 x 32 elements or more.
void cast_to_float8(std::vector<Float8CastEntry> entries, c10::Device device);

/// A float32 matrix whose fp8 copy a fused step has written. Sizes are multiples of 16.
struct Float8CopyEntry {
  const void* weight;
  std::int64_t rows;
  std::int64_t columns;
  void* copy;        ///< [rows, columns], behind a header.
  void* transposed;  ///< [columns, rows], or null.
};

/// Makes fp8 copies what casts of the weights would be, by one launch on the current stream of a
/// device (under graph capture one more for tables that do not fit a kernel's arguments). To be
/// called after each step that has been given the copies, skipped ones included. Does not wait for
/// the device.
void refresh_float8_copies(const std::vector<Float8CopyEntry>& entries, c10::Device device);

}  // namespace fastamp::kernels::cuda
