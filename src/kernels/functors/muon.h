// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/fused.h"
#include "kernels/functors/host_device.h"
#include "kernels/functors/learning_rate.h"
#include "kernels/functors/narrow_moments.h"

namespace fastamp::kernels {

/// Interpolation from the nearer end, as torch's lerp does it: weights of 0 and 1 are exact.
struct Lerp {
  float weight;
  bool near;  ///< The result is nearer to `from`.

  static FASTAMP_HOST_DEVICE Lerp by(double weight) {
    const auto rounded = static_cast<float>(weight);
    const bool near = rounded < 0.5F;
    return {near ? rounded : rounded - 1.0F, near};
  }
  FASTAMP_HOST_DEVICE float operator()(float from, float to) const {
    return fused(weight, to - from, near ? from : to);
  }
};

/// Constants by which a group's momentum moves.
struct MuonMomentumConstants {
  double momentum;
  bool nesterov;
};

/// One element before the Newton-Schulz iteration: fastamp/ops/fused_steps.h, muon_momentum_.
struct MuonMomentum {
  Lerp follow;
  Lerp ahead;
  bool nesterov;

  static FASTAMP_HOST_DEVICE MuonMomentum at(const MuonMomentumConstants& group) {
    return {Lerp::by(1.0 - group.momentum), Lerp::by(group.momentum), group.nesterov};
  }
  /// Whether a narrow buffer that may be rounded by noise is.
  FASTAMP_HOST_DEVICE bool noisy_first() const {
    return follow.near && first_moments_need_noise(follow.weight);
  }
  /// @returns the element of the update matrix.
  FASTAMP_HOST_DEVICE float operator()(float grad, float& buffer) const {
    buffer = follow(buffer, grad);
    const float further = ahead(grad, buffer);
    return nesterov ? further : buffer;
  }
};

/// Hyperparameters of parameters of one group and shape.
struct MuonApplyConstants {
  LearningRate lr;
  double ratio;  ///< What the shape multiplies the rate with.
  double weight_decay;
};

/// One element after the iteration: muon_apply_. Constants are taken in fp64 and rounded once.
struct MuonApply {
  float minus_rate;
  float kept;  ///< 1 - lr * weight_decay; 1 changes no bit.

  static FASTAMP_HOST_DEVICE MuonApply at(const MuonApplyConstants& group) {
    const double lr = group.lr.value();
    return {static_cast<float>(-(lr * group.ratio)),
            static_cast<float>(1.0 - lr * group.weight_decay)};
  }
  FASTAMP_HOST_DEVICE void operator()(float update, float& weight) const {
    weight = fused(update, minus_rate, weight * kept);
  }
};

}  // namespace fastamp::kernels
