// SPDX-License-Identifier: Apache-2.0
#pragma once

// One fused step, emulated and on the CPU, over lists that mix all that a step can meet.

#include "cuda_on_cpu/tensors.h"
#include "kernels/fused_adamw.h"
#include "kernels/fused_sgd.h"

#include <optional>
#include <vector>

namespace fastamp::test {

/// What varies between steps.
struct StepCase {
  std::size_t groups = 1;
  bool amsgrad = false;
  bool bf16_moments = false;
  bool skips = false;
  bool writes = false;
  bool clips = false;
  bool scales = false;
  std::size_t skew = 0;  ///< 0: every array on a 64-byte boundary.

  /// All combinations of the flags, thinned out; few if brief().
  static std::vector<StepCase> all();
};

/// The lists of a step. 16-bit parameters with masters, float32 ones with and without weight
/// copies, gradients of all dtypes. `entries` are as src/ops makes them, and refer to the lists.
struct StepLists {
  std::vector<at::Tensor> params, grads, first, second, greatest, steps, masters, copies;
  std::vector<std::int64_t> group_sizes, copy_of;

  StepLists copy() const;
  bool same_as(const StepLists& other) const;
  std::vector<kernels::StepEntry> entries(bool adam, const StepCase& c) const;
};

/// Whether a group's first moment is in use; SGD's third groups have no momentum.
bool has_momentum(bool adam, std::size_t group);

StepLists make_step_lists(const StepCase& c, bool adam);

/// Gate of a case: scale, coefficient, flag, clip value.
struct StepGateArgs {
  std::optional<at::Tensor> inv_scale, clip_coef, found_inf;
  std::optional<double> clip_value;
  explicit StepGateArgs(const StepCase& c);
};

}  // namespace fastamp::test
