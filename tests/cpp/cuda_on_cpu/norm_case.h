// SPDX-License-Identifier: Apache-2.0
#pragma once

// One call of a pass that adds up squares, emulated and on the CPU.

#include "cuda_on_cpu/tensors.h"

#include <optional>
#include <vector>

namespace fastamp::test {

/// What such a pass writes beside the gradients.
struct NormOutputs {
  std::optional<at::Tensor> sum;
  std::optional<at::Tensor> counts;
  std::optional<at::Tensor> coefficient;
  std::optional<at::Tensor> norm;
  at::Tensor flag;

  explicit NormOutputs(std::size_t grads);
  double sum_value() const { return *sum->const_data_ptr<double>(); }
};

/// Runs norm_and_check_, or unscale_and_check_ with sum and counts if `writes`, on copies of the
/// gradients on the CPU and on the gradients emulated; compares all that the two leave.
/// Returns the emulated sum.
/// @param flag  What the flag is before; if it is neither 0 nor 1, it is overwritten.
double check_norm_case(const std::vector<at::Tensor>& grads, float inv_scale, bool writes,
                       float flag = 0.0F);

/// As check_norm_case(), for factors with products that are not finite: what raises the flag, and
/// the counts, are the CPU kernel's, and the flag is what `expected` says.
void check_overflow_case(const std::vector<at::Tensor>& grads, float inv_scale, bool writes,
                         bool expected, double max_norm = 2.0);

/// The sum of squares of unscaled gradients in long double.
double exact_sum(const std::vector<at::Tensor>& grads, float inv_scale);

}  // namespace fastamp::test
