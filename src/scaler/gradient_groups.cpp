#include "scaler/gradient_groups.h"

#include "scaler/scale_ops.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fastamp::scaler {
namespace {}  // namespace

void unscale_with_torch(std::vector<at::Tensor> gradients, const at::Tensor& inv_scale,
                        at::Tensor& found_inf) {
  while (!gradients.empty()) {
    const auto dtype = gradients.front().scalar_type();
    const auto others = std::ranges::partition(
        gradients, [dtype](const at::Tensor& gradient) { return gradient.scalar_type() == dtype; });
    const auto count = static_cast<std::size_t>(others.begin() - gradients.begin());
    at::_amp_foreach_non_finite_check_and_unscale_(at::TensorList(gradients.data(), count),
                                                   found_inf, inv_scale);
    gradients.erase(gradients.begin(), others.begin());
  }
}

DeviceGradients& GradientGroups::group_for(c10::Device device) {
  for (auto& group : groups_) {
    if (group.device == device) {
      return group;
    }
  }
  last_ = nullptr;  // The vector may move its elements.
  auto& group =
      groups_.emplace_back(DeviceGradients{.device = device, .gradients = {}, .positions = {}});
  group.positions.reserve(expected_);
  group.gradients.reserve(std::exchange(expected_, 0));
  return group;
}

void GradientGroups::push(const at::Tensor& gradient, std::uint32_t position) {
  auto& group = group_for(gradient.device());
  group.gradients.push_back(gradient);
  group.positions.push_back(position);
  group.any_double = group.any_double || gradient.scalar_type() == at::kDouble;
  last_ = &group;
}

GradientGroups::Taken GradientGroups::add_other(const at::Tensor& parameter,
                                                const at::Tensor& gradient,
                                                std::uint32_t position) {
  TORCH_CHECK_VALUE(allow_fp16_ || gradient.scalar_type() != at::kHalf,
                    "unscale_: expected gradients of float32, bfloat16 or float64, got float16 for "
                    "a parameter of shape ",
                    parameter.sizes(),
                    ". Attempting to unscale FP16 gradients. Keep the parameters in float32 and "
                    "let autocast lower the operators.");
  const auto keys = gradient.key_set();
  if (keys.has(c10::DispatchKey::Python)) {
    return Taken::kForeign;
  }
  if (gradient.is_sparse()) {
    sparse_.push_back({.parameter = parameter, .gradient = gradient, .position = position});
    return Taken::kYes;
  }
  push(gradient, position);
  last_keys_ = keys;
  last_dtype_ = gradient.scalar_type();
  return Taken::kYes;
}

void GradientGroups::take_sparse_values() {
  for (auto& [parameter, gradient, position] : sparse_) {
    // Adding duplicates in fp16 can overflow although every summand is finite, so the check must
    // see the sums. fp32 duplicates are left as they are: unscaling is linear.
    if (coalesce_all_ || gradient.scalar_type() == at::kHalf) {
      gradient = gradient.coalesce();
      parameter.mutable_grad() = gradient;
    }
    push(gradient._values(), position);
    last_->any_duplicates = last_->any_duplicates || !gradient.is_coalesced();
  }
  last_ = nullptr;
  sparse_.clear();
}

std::vector<DeviceGradients> GradientGroups::release() {
  const at::NoGradGuard no_grad;
  take_sparse_values();
  parameters_ = 0;
  return std::exchange(groups_, {});
}

std::vector<DeviceFlag> GradientGroups::unscale_(const at::Tensor& inv_scale,
                                                 const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  take_sparse_values();
  std::vector<DeviceFlag> flags;
  flags.reserve(groups_.size());
  for (auto& group : groups_) {
    auto flag = found_inf.to(group.device, at::kFloat, /*non_blocking=*/true, /*copy=*/true);
    const auto local_inverse = inv_scale.device() == group.device
                                   ? inv_scale
                                   : inv_scale.to(group.device, at::kFloat, /*non_blocking=*/true);
    if (has_native_kernels(group.device.type())) {
      ops::unscale_and_check_(group.gradients, local_inverse, flag);
    } else {
      unscale_with_torch(group.gradients, local_inverse, flag);
    }
    flags.push_back({.device = group.device, .found_inf = std::move(flag)});
  }
  return flags;
}

}  // namespace fastamp::scaler
