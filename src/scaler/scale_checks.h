// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/scale_ops.h"

#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>

namespace fastamp::scaler {

/// torch.amp's own conditions, growth_factor > 1 and backoff_factor < 1, and growth_interval >= 0.
/// @throws c10::ValueError
void check_rules(const char* function, const ScaleRules& rules);

/// @throws c10::ValueError if a scale is not finite in fp32. torch's may be 0 or negative.
void check_scale(const char* function, const char* argument, double scale);

/// @throws c10::ValueError unless update() may copy the tensor into a scale on such a device.
void check_new_scale(const at::Tensor& new_scale, c10::DeviceType device);

/// @throws c10::ValueError
void check_history_size(const char* function, int64_t history_size);

/// Conditions on what torch.amp does not have: 0 < min_scale <= scale <= max_scale, hysteresis
/// and fast_growth_interval >= 1 where they are used.
/// @throws c10::ValueError
void check_extras(const char* function, const ScaleRules& rules, std::optional<double> scale);

/// @throws c10::ValueError if `value` is below min_scale or above max_scale.
void check_within_bounds(const char* function, const char* argument, const ScaleRules& rules,
                         double value);

/// The scale of a state, and its counts, which are kept in 32 bits.
/// @throws c10::ValueError
void check_counts(const char* function, const GradScalerState& state);

/// Checks what a state has of past iterations: counts from 0, consecutive steps.
/// @throws c10::ValueError
void check_notes(const char* function, const GradScalerState& state);

}  // namespace fastamp::scaler
