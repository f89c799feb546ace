// SPDX-License-Identifier: Apache-2.0
#include "scaler/clip_norms.h"
#include "scaler/gradient_factors.h"
#include "scaler/gradient_pass.h"
#include "scaler/scale_ops.h"

#include <fastamp/scaler/clip.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace fastamp {

using scaler::DeviceGradients;

namespace {

std::vector<DeviceGradients> gather(at::TensorList parameters) {
  scaler::GradientGroups groups(scaler::Purpose::kNorm);
  groups.reserve(parameters.size());
  TORCH_CHECK_NOT_IMPLEMENTED(
      groups.add_all(parameters),
      "clip_grad_norm_: expected gradients that are plain tensors, got a Python tensor subclass; "
      "use fastamp.clip_grad_norm_ of Python for it.");
  return groups.release();
}

void check_parameters(at::TensorList parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK_VALUE(parameters[i].defined(), "clip_grad_norm_: expected parameters[", i,
                      "] to be a tensor, got an undefined one");
  }
}

/// Whether our kernels can take them; complex ones are left to torch.
bool have_kernels(const std::vector<DeviceGradients>& gradients) {
  return scaler::can_check(gradients) &&
         std::ranges::all_of(gradients, [](const DeviceGradients& group) {
           return std::ranges::all_of(group.gradients, [](const at::Tensor& gradient) {
             return at::isFloatingType(gradient.scalar_type());
           });
         });
}

at::Tensor norm_of(const std::vector<DeviceGradients>& gradients, double norm_type,
                   bool has_kernel) {
  if (norm_type != 2.0 || !has_kernel) {
    return scaler::norm_of_norms(gradients, norm_type, /*widen=*/false);
  }
  const auto one = at::ones({}, at::TensorOptions(at::kFloat).device(gradients.front().device));
  return scaler::check(gradients, one, scaler::flag_without_value(one),
                       {.flag = scaler::FlagUse::kOverwrite})
      .total_norm(scaler::norm_dtype(gradients));
}

}  // namespace

at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm, double norm_type,
                           bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  check_parameters(parameters);
  const auto gradients = gather(parameters);
  if (gradients.empty()) {
    return at::zeros({});
  }
  const bool has_kernel = have_kernels(gradients);
  const auto norm = norm_of(gradients, norm_type, has_kernel);
  if (error_if_nonfinite) {
    scaler::check_finite(norm, norm_type);
  }
  const auto coefficient = scaler::clip_coefficient(norm, max_norm);
  if (has_kernel) {
    scaler::multiply_(gradients, coefficient);
    return norm;
  }
  for (const auto& group : gradients) {
    at::_foreach_mul_(group.gradients, coefficient.to(group.device, coefficient.scalar_type()));
  }
  return norm;
}

}  // namespace fastamp
