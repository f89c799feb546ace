// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/fused.h"
#include "kernels/functors/host_device.h"
#include "kernels/functors/learning_rate.h"
#include "kernels/functors/narrow_moments.h"

namespace fastamp::kernels {

/// Hyperparameters of a group, as the optimizer has them.
struct SgdConstants {
  LearningRate lr;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
};

/// One element of a step: fastamp/ops/fused_steps.h, fused_sgd_.
struct SgdUpdate {
  float minus_lr;
  float momentum;
  float grad_weight;
  float weight_decay;
  // Bits: one register of a GPU.
  bool has_momentum : 1;
  bool first : 1;  ///< The buffer is not in use yet, and may hold anything.
  bool nesterov : 1;
  bool maximize : 1;
  bool noisy : 1;  ///< A narrow buffer that may be rounded by noise is.

  /// `steps`: how many the momentum buffer has seen.
  static FASTAMP_HOST_DEVICE SgdUpdate at(const SgdConstants& group, float steps) {
    return {static_cast<float>(-group.lr.value()),
            static_cast<float>(group.momentum),
            static_cast<float>(1.0 - group.dampening),
            static_cast<float>(group.weight_decay),
            group.momentum != 0.0,
            steps == 0.0F,
            group.nesterov,
            group.maximize,
            first_moments_need_noise(static_cast<float>(1.0 - group.momentum))};
  }

  /// Both sides of each choice are computed and one is kept: the loop stays free of branches.
  FASTAMP_HOST_DEVICE void operator()(float grad, float& weight, float& buffer) const {
    grad = oriented(grad, weight);
    const float next = fused(grad, grad_weight, momentum * buffer);
    buffer = first ? grad : next;
    const float ahead = fused(buffer, momentum, grad);
    weight = fused(nesterov ? ahead : buffer, minus_lr, weight);
  }

  FASTAMP_HOST_DEVICE void operator()(float grad, float& weight) const {
    weight = fused(oriented(grad, weight), minus_lr, weight);
  }

 private:
  FASTAMP_HOST_DEVICE float oriented(float grad, float weight) const {
    const float sign = maximize ? -grad : grad;
    const float decayed = fused(weight, weight_decay, sign);
    // Not the sum with a zero: that would turn -0 into 0 and an infinite weight into NaN.
    return weight_decay != 0.0F ? decayed : sign;
  }
};

}  // namespace fastamp::kernels
