// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastamp::optim {

/// Request of a gradient scaler to an optimizer's step, all of it decided on the device: gradients
/// are multiplied by inv_scale, then by clip_coef, then brought within clip_value, and nothing but
/// the gradients changes where found_inf is not 0. Tensors are float32 of one element; absent ones
/// stand for 1, 1 and 0. They may live on any device: a step copies them where it needs them.
struct AmpStep {
  std::optional<at::Tensor> inv_scale;
  std::optional<at::Tensor> clip_coef;
  std::optional<at::Tensor> found_inf;
  std::optional<double> clip_value;
  bool write_grads = true;  ///< False: leaves the gradients as they were, not unscaled or clipped.
};

}  // namespace fastamp::optim
