#pragma once

#include "kernels/functors/fused.h"
#include "kernels/functors/host_device.h"
#include "kernels/functors/learning_rate.h"

#include <cmath>

namespace fastamp::kernels {

/// Hyperparameters of a group, as the optimizer has them.
struct AdamGroup {
  LearningRate lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;  ///< AdamW: the weight decays by itself, not through the gradient.
  bool amsgrad;
  bool maximize;
};

/// One element of a step: fastamp/ops/fused_steps.h, fused_adamw_. Constants are taken in fp64 and
/// rounded once, as torch's are.
struct Adam {
  float lerp_weight;  ///< 1 - beta1.
  float beta2;
  float square_weight;  ///< 1 - beta2.
  float eps;
  float weight_decay;
  float kept;  ///< Of a weight that decays by itself.
  float minus_step_size;
  float correction2_sqrt;
  bool decoupled;
  bool amsgrad;
  bool maximize;

  /// `steps` is what the moments have seen before this step.
  static FASTAMP_HOST_DEVICE Adam at(const AdamGroup& group, float steps) {
    const double lr = group.lr.value();
    const double t = static_cast<double>(steps) + 1.0;
    const double correction1 = 1.0 - std::pow(group.beta1, t);
    const double correction2 = 1.0 - std::pow(group.beta2, t);
    return {static_cast<float>(1.0 - group.beta1),
            static_cast<float>(group.beta2),
            static_cast<float>(1.0 - group.beta2),
            static_cast<float>(group.eps),
            static_cast<float>(group.weight_decay),
            static_cast<float>(1.0 - lr * group.weight_decay),
            static_cast<float>(-(lr / correction1)),
            static_cast<float>(std::sqrt(correction2)),
            group.decoupled,
            group.amsgrad,
            group.maximize};
  }

  /// `greatest` is read and written with amsgrad only.
  template <bool kAmsgrad>
  FASTAMP_HOST_DEVICE void step(float grad, float& weight, float& first, float& second,
                                float& greatest) const {
    grad = maximize ? -grad : grad;
    const bool decays = weight_decay != 0.0F;
    const float shrunk = weight * kept;
    weight = decays && decoupled ? shrunk : weight;
    const float coupled = fused(weight, weight_decay, grad);
    grad = decays && !decoupled ? coupled : grad;
    first = lerp(first, grad);
    second = fused(square_weight * grad, grad, second * beta2);
    float scale = second;
    if constexpr (kAmsgrad) {
      // A NaN stays, as in torch's maximum.
      const float larger = greatest > second ? greatest : second;
      greatest = greatest != greatest ? greatest : larger;
      scale = greatest;
    }
    const float denominator = std::sqrt(scale) / correction2_sqrt + eps;
    weight = weight + minus_step_size * first / denominator;
  }

 private:
  /// torch's lerp: from the nearer end, so that weights of 0 and 1 are exact.
  FASTAMP_HOST_DEVICE float lerp(float from, float to) const {
    const bool near = lerp_weight < 0.5F;
    return fused(near ? lerp_weight : lerp_weight - 1.0F, to - from, near ? from : to);
  }
};

}  // namespace fastamp::kernels
