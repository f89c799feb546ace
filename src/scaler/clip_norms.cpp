// SPDX-License-Identifier: Apache-2.0
#include "scaler/clip_norms.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace fastamp::scaler {

at::Tensor norm_of_norms(const std::vector<DeviceGradients>& gradients, double norm_type,
                         bool widen) {
  const auto home = gradients.front().device;
  std::vector<at::Tensor> norms;
  for (const auto& group : gradients) {
    for (const auto& norm : at::_foreach_norm(group.gradients, norm_type)) {
      norms.push_back(widen ? norm.to(home, group.any_double ? at::kDouble : at::kFloat)
                            : norm.to(home, norm.scalar_type()));
    }
  }
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

at::ScalarType norm_dtype(const std::vector<DeviceGradients>& gradients) {
  auto dtype = gradients.front().gradients.front().scalar_type();
  for (const auto& group : gradients) {
    for (const auto& gradient : group.gradients) {
      dtype = c10::promoteTypes(dtype, gradient.scalar_type());
    }
  }
  return dtype;
}

void check_finite(const at::Tensor& norm, double norm_type) {
  const auto value = norm.item<double>();  // sync: asked for
  TORCH_CHECK(std::isfinite(value), "clip_grad_norm_: expected finite gradients, got a norm of ",
              value, ": The total norm of order ", norm_type,
              " for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
              "this error and scale the gradients by the non-finite norm anyway, set "
              "`error_if_nonfinite=False`");
}

}  // namespace fastamp::scaler
