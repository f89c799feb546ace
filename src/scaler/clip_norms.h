// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace fastamp::scaler {

/// torch's norm of any order, over at least one gradient: a norm of norms, on the first device.
/// @param widen  Norms of 16-bit gradients go on in fp32; else in their own dtype, as in torch.
at::Tensor norm_of_norms(const std::vector<DeviceGradients>& gradients, double norm_type,
                         bool widen);

/// The dtype that norm_of_norms() has without `widen`.
at::ScalarType norm_dtype(const std::vector<DeviceGradients>& gradients);

/// Refuses a norm that is inf or NaN. sync: waits for the device.
/// @throws c10::Error
void check_finite(const at::Tensor& norm, double norm_type);

}  // namespace fastamp::scaler
