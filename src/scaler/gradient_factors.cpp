// SPDX-License-Identifier: Apache-2.0
#include "scaler/gradient_factors.h"

#include "core/device_copy.h"
#include "core/kernel_devices.h"
#include "kernels/functors/norm.h"
#include "scaler/scale_ops.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>

#include <cstddef>
#include <utility>

namespace fastamp::scaler {
at::Tensor clip_coefficient(const at::Tensor& total_norm, double max_norm) {
  const at::NoGradGuard no_grad;
  if (is_plain_cpu_scalar(total_norm, at::kFloat)) {
    auto coefficient = at::empty({}, total_norm.options().requires_grad(false));
    *coefficient.mutable_data_ptr<float>() = kernels::clip_coefficient(
        static_cast<float>(max_norm), *total_norm.const_data_ptr<float>());
    return coefficient;
  }
  return at::clamp(max_norm / (total_norm + 1e-6), std::nullopt, 1.0);
}

void raise_unless_finite(at::Tensor& flag, const at::Tensor& factor) {
  const at::NoGradGuard no_grad;
  if (is_plain_cpu_scalar(factor, at::kFloat) &&
      !kernels::is_non_finite(*factor.const_data_ptr<float>())) [[likely]] {
    return;
  }
  if (has_kernels(flag.device().type())) {
    const auto local = on_device(factor, flag.device(), at::kFloat);
    ops::norm_and_check_({local}, local, flag, new_scalar(flag, at::kDouble));
  } else {
    unscale_with_torch({copy_on(factor, flag.device(), at::kFloat)}, at::ones_like(flag), flag);
  }
}

void multiply_(const std::vector<DeviceGradients>& groups, const at::Tensor& factor) {
  struct Local {
    at::Tensor factor;
    at::Tensor flag;  ///< Nobody reads it, so it needs no value; undefined: there is no kernel.
  };
  const at::NoGradGuard no_grad;
  std::vector<Local> locals;  // All of them before the first gradient is written.
  locals.reserve(groups.size());
  for (const auto& group : groups) {
    const bool has_kernel = has_checks(group);
    auto local = on_device(factor, group.device, has_kernel ? at::kFloat : factor.scalar_type());
    auto flag = has_kernel ? flag_without_value(local) : at::Tensor();
    locals.push_back({std::move(local), std::move(flag)});
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& [local, flag] = locals[i];
    if (flag.defined()) {
      ops::unscale_and_check_(groups[i].gradients, local, flag);
    } else {
      at::_foreach_mul_(groups[i].gradients, local);
    }
  }
}

void zero_if_(const std::vector<DeviceGradients>& groups, const at::Tensor& flag) {
  const at::NoGradGuard no_grad;
  for (const auto& group : groups) {
    const auto raised = on_device(flag, group.device, at::kFloat).ne(0);
    if (raised.is_cpu() && !raised.item<bool>()) {
      continue;
    }
    for (const auto& gradient : group.gradients) {
      gradient.masked_fill_(raised, 0);
    }
  }
}

}  // namespace fastamp::scaler
