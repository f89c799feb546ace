// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_on_cpu/step_case.h"

#include <vector>

namespace fastamp::test {

/// Hyperparameters of each group of an AdamW step.
struct AdamwGroups {
  std::vector<double> lr, beta1, beta2, eps, decay;
  std::vector<bool> decoupled, amsgrad, maximize;

  /// Groups that differ in all that there is.
  explicit AdamwGroups(const StepCase& c);
};

/// A step as torch's foreach kernels make it on CUDA, one of their operations after the other, with
/// the AmpStep before them and masters and weight copies after; shares no code with the functors.
void step_as_torch_on_cuda(const StepLists& lists, const StepCase& c);

}  // namespace fastamp::test
