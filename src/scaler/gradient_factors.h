// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastamp::scaler {

/// Returns min(1, max_norm / (total_norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ computes it, in
/// total_norm's dtype. No synchronisation.
FASTAMP_API at::Tensor clip_coefficient(const at::Tensor& total_norm, double max_norm);

/// Raises a flag, fp32 of one element on any device, if a factor is inf or NaN. No synchronisation.
FASTAMP_API void raise_unless_finite(at::Tensor& flag, const at::Tensor& factor);

/// Multiplies gradients in place by a factor of one element, which is copied to each device met.
/// A factor of 1 writes nothing where we have kernels.
FASTAMP_API void multiply_(const std::vector<DeviceGradients>& groups, const at::Tensor& factor);

/// Writes 0 into gradients if a flag, of one element on any device, is not 0. No synchronisation.
FASTAMP_API void zero_if_(const std::vector<DeviceGradients>& groups, const at::Tensor& flag);

}  // namespace fastamp::scaler
