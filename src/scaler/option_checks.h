#pragma once

#include "scaler/scale_ops.h"

#include <fastamp/scaler/grad_scaler.h>

#include <optional>

namespace fastamp::scaler {

/// torch.amp's own conditions, and no more: growth_factor > 1 and backoff_factor < 1.
/// @throws c10::Error
void check_factors(const char* function, const ScaleRules& rules);

/// Conditions on what torch.amp does not have: 0 < min_scale <= scale <= max_scale, hysteresis
/// >= 1.
/// @throws c10::ValueError
void check_extras(const char* function, const ScaleRules& rules, std::optional<double> scale);

/// @throws c10::ValueError if `value` is below min_scale or above max_scale.
void check_within_bounds(const char* function, const char* argument, const ScaleRules& rules,
                         double value);

/// What a state tells of past iterations: counts from 0, consecutive steps.
/// @throws c10::ValueError
void check_notes(const char* function, const GradScalerState& state);

}  // namespace fastamp::scaler
