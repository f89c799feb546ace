// Factors that clipping brings to gradients.

#include "scaler/gradient_pass.h"
#include "scaler/scale_ops.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace fastamp::scaler {
namespace {

bool has_kernels(const DeviceGradients& group) {
  return has_native_kernels(group.device.type()) && !group.any_double;
}

}  // namespace

at::Tensor clip_coefficient(const at::Tensor& total_norm, double max_norm) {
  const at::NoGradGuard no_grad;
  if (is_plain_cpu_scalar(total_norm, at::kFloat)) {
    // torch divides a number by a tensor as reciprocal times number, in fp32.
    const float inverse = 1.0F / (*total_norm.const_data_ptr<float>() + 1e-6F);
    const float coefficient = inverse * static_cast<float>(max_norm);
    auto clamped = at::empty({}, total_norm.options().requires_grad(false));
    *clamped.mutable_data_ptr<float>() = coefficient > 1.0F ? 1.0F : coefficient;  // NaN stays
    return clamped;
  }
  return at::clamp(max_norm / (total_norm + 1e-6), std::nullopt, 1.0);
}

bool has_read_only_pass(const std::vector<DeviceGradients>& gradients) {
  return std::ranges::all_of(gradients, has_kernels);
}

void multiply_(const std::vector<DeviceGradients>& groups, const at::Tensor& factor) {
  const at::NoGradGuard no_grad;
  for (const auto& group : groups) {
    const bool ours = has_kernels(group);
    const auto dtype = ours ? at::kFloat : factor.scalar_type();
    const auto local = factor.to(group.device, dtype, /*non_blocking=*/true);
    if (ours) {
      ops::unscale_and_check_(group.gradients, local, new_flag(local));
    } else {
      at::_foreach_mul_(group.gradients, local);
    }
  }
}

}  // namespace fastamp::scaler
