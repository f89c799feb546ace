// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/divide.h"
#include "kernels/functors/fused.h"
#include "kernels/functors/host_device.h"
#include "kernels/functors/learning_rate.h"
#include "kernels/functors/narrow_moments.h"
#include "kernels/functors/step_count.h"

#include <cmath>

namespace fastamp::kernels {

/// Hyperparameters of a group, as the optimizer has them.
struct AdamConstants {
  LearningRate lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;  ///< AdamW: decay acts on the weight itself, not through the gradient.
  bool amsgrad;
  bool maximize;
};

/// Order in which products are grouped where that changes bits: as torch's optimizers on each
/// device group them, whose results the steps there have. Source: torch 2.11, UnaryOps and
/// PointwiseOps of ATen/native/cpu, and ATen/native/cuda/DeviceAddCmulCdiv.cuh.
enum class AdamOrder : unsigned char {
  kCpu,   ///< (a * g) * g and (s * m) / d
  kCuda,  ///< a * (g * g) and s * (m / d), each with its sum in one rounding
};

/// The order of a CUDA kernel. Executed on a CPU it has the CPU's, to be compared with; a test asks
/// for the other one. Not inline: sources may differ in it.
#ifdef FASTAMP_ADAM_ORDER
constexpr AdamOrder kDeviceOrder = AdamOrder::FASTAMP_ADAM_ORDER;
#elif defined(__CUDACC__)
constexpr AdamOrder kDeviceOrder = AdamOrder::kCuda;
#else
constexpr AdamOrder kDeviceOrder = AdamOrder::kCpu;
#endif

/// Branches that a step takes; known to the compiler where a loop is to be vectorised.
struct AdamModes {
  // Bits: one register of a GPU.
  bool amsgrad : 1;
  bool couples : 1;  ///< Weight decay goes through the gradient.
  bool near : 1;     ///< The first moment is nearer to its old value than to the gradient.
};

/// One element of a step: fastamp/ops/fused_steps.h, fused_adamw_. Constants are taken in fp64 and
/// rounded once, as torch's are. A factor of 1 stands for a feature that is not in use: it changes
/// no bit.
struct AdamUpdate {
  float sign;         ///< -1 to maximize.
  float lerp_weight;  ///< 1 - beta1, from the nearer end: so weights of 0 and 1 are exact.
  float beta2;
  float square_weight;  ///< 1 - beta2.
  float eps;
  float weight_decay;
  float decay_factor;  ///< AdamW: 1 - lr * weight_decay, else 1.
  float minus_step_size;
  float correction2_sqrt;
  float correction2_reciprocal;  ///< Of correction2_sqrt.
  AdamModes modes;

  /// `count`: of the steps that the moments have seen before this one.
  static FASTAMP_HOST_DEVICE AdamUpdate at(const AdamConstants& group, float count) {
    const double lr = group.lr.value();
    const double t = static_cast<double>(steps_of(count)) + 1.0;
    const double correction1 = 1.0 - std::pow(group.beta1, t);
    const double correction2 = 1.0 - std::pow(group.beta2, t);
    const auto lerp_weight = static_cast<float>(1.0 - group.beta1);
    const auto weight_decay = static_cast<float>(group.weight_decay);
    const bool near = lerp_weight < 0.5F;
    const bool decays = weight_decay != 0.0F;
    const auto root2 = static_cast<float>(std::sqrt(correction2));
    return {group.maximize ? -1.0F : 1.0F,
            near ? lerp_weight : lerp_weight - 1.0F,
            static_cast<float>(group.beta2),
            static_cast<float>(1.0 - group.beta2),
            static_cast<float>(group.eps),
            weight_decay,
            decays && group.decoupled ? static_cast<float>(1.0 - lr * group.weight_decay) : 1.0F,
            static_cast<float>(-(lr / correction1)),
            root2,
            1.0F / root2,
            {group.amsgrad, decays && !group.decoupled, near}};
  }

  /// Flag of moments that are rounded by noise: whether first ones are, too.
  FASTAMP_HOST_DEVICE bool noisy_first() const {
    return modes.near && first_moments_need_noise(lerp_weight);
  }

  /// `greatest` is read and written with amsgrad only.
  template <AdamOrder kOrder>
  FASTAMP_HOST_DEVICE void step(AdamModes mode, float grad, float& weight, float& first,
                                float& second, float& greatest) const {
    grad = grad * sign;
    weight = weight * decay_factor;
    if (mode.couples) {
      grad = fused(weight, weight_decay, grad);
    }
    first = fused(lerp_weight, grad - first, mode.near ? first : grad);
    second = kOrder == AdamOrder::kCuda ? fused(square_weight, grad * grad, second * beta2)
                                        : fused(square_weight * grad, grad, second * beta2);
    float scale = second;
    if (mode.amsgrad) {
      // A NaN stays, as in torch's maximum.
      const float larger = greatest > second ? greatest : second;
      greatest = greatest != greatest ? greatest : larger;
      scale = greatest;
    }
    const float root = std::sqrt(scale);
    // The same bits: each device has what is faster there.
    const float corrected = kOrder == AdamOrder::kCuda
                                ? divide(root, correction2_sqrt, correction2_reciprocal)
                                : root / correction2_sqrt;
    const float denominator = corrected + eps;
    weight = kOrder == AdamOrder::kCuda ? fused(minus_step_size, first / denominator, weight)
                                        : weight + minus_step_size * first / denominator;
  }
};

}  // namespace fastamp::kernels
