// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastamp {

/// Magnitudes of the elements of tensors, counted by their exponents (ops::count_exponents_).
///
/// A value on the host. Shares are exact up to one number: of those that lie on a bound of a dtype
/// between two powers of two, none is distinguished from its neighbours with the same exponent.
class FASTAMP_API NumberRange {
 public:
  /// Counts no elements.
  NumberRange();

  /// Counts the elements of one tensor; waits for the device.
  /// @param tensor  Strided, float16, bfloat16 or float32, of any shape.
  /// @throws c10::TypeError, c10::ValueError  as ops::count_exponents_.
  static NumberRange of(const at::Tensor& tensor);
  /// Counts each tensor of a list on one device; one call of the operator.
  static std::vector<NumberRange> of_each(at::TensorList tensors);
  /// Reads a row of ops::count_exponents_.
  /// @param row  int64 of 260 elements, on the CPU.
  static NumberRange of_row(const at::Tensor& row);

  NumberRange& operator+=(const NumberRange& other);

  int64_t elements() const;
  int64_t zeros() const { return counts_[kZeros]; }
  int64_t inf() const { return counts_[kInf]; }
  int64_t nan() const { return counts_[kNan]; }
  /// Elements with 2^exponent <= |x| < 2^(exponent + 1); -127 stands for all that are smaller.
  int64_t at_exponent(int64_t exponent) const;
  /// The greatest finite |x|, and the smallest that is not 0; 0 if there is none.
  double greatest() const;
  double least() const;

  /// Share of the elements, from 0 to 1, that are 0, or would round to 0 in `dtype` if multiplied
  /// by 2^shift.
  double share_of_zeros(c10::ScalarType dtype, int64_t shift = 0) const;
  /// Counts those that would be subnormal in `dtype`, and not 0.
  double share_of_subnormals(c10::ScalarType dtype, int64_t shift = 0) const;
  /// The largest shift for which the greatest |x| times 2^shift is finite in `dtype`; none if there
  /// is no finite element but 0.
  std::optional<int64_t> largest_shift(c10::ScalarType dtype) const;

 private:
  static constexpr std::size_t kInf = 255;
  static constexpr std::size_t kNan = 256;
  static constexpr std::size_t kZeros = 257;

  int64_t below(int64_t exponent) const;

  std::vector<int64_t> counts_;
};

}  // namespace fastamp
