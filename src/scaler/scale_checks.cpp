// SPDX-License-Identifier: Apache-2.0
#include "scaler/scale_checks.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

namespace fastamp::scaler {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr int64_t kMaxHistorySize = 16777215;  // 2^24 - 1, as Python's.

bool is_finite_in_float32(double number) {
  return std::abs(number) <= std::numeric_limits<float>::max();
}

void check_count(const char* function, const char* name, std::optional<int64_t> count,
                 int64_t least) {
  TORCH_CHECK_VALUE(!count || (*count >= least && *count <= kMaxCount), function, ": expected ",
                    least, " <= ", name, " < 2^31, got ", *count);
}

}  // namespace

// The conditions are written so that NaN meets none.
void check_rules(const char* function, const ScaleRules& rules) {
  TORCH_CHECK_VALUE(rules.growth_factor > 1.0, function, ": expected growth_factor > 1.0, got ",
                    rules.growth_factor);
  TORCH_CHECK_VALUE(rules.backoff_factor < 1.0, function, ": expected backoff_factor < 1.0, got ",
                    rules.backoff_factor);
  TORCH_CHECK_VALUE(rules.growth_interval >= 0, function, ": expected growth_interval >= 0, got ",
                    rules.growth_interval);
}

void check_scale(const char* function, const char* argument, double scale) {
  TORCH_CHECK_VALUE(is_finite_in_float32(scale), function, ": expected ", argument,
                    " to be finite in float32, got ", scale);
}

void check_new_scale(const at::Tensor& new_scale, c10::DeviceType device) {
  TORCH_CHECK_VALUE(new_scale.defined(),
                    "update: expected new_scale to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(new_scale.device().type() == device, "update: expected new_scale on a ", device,
                    " device, got ", new_scale.device());
  TORCH_CHECK_VALUE(new_scale.layout() == at::kStrided && !new_scale.is_complex(),
                    "update: expected new_scale to be dense and real, got ", new_scale.toString());
  TORCH_CHECK_VALUE(new_scale.numel() == 1, "update: expected new_scale of one element, got shape ",
                    new_scale.sizes());
  TORCH_CHECK_VALUE(!new_scale.requires_grad(),
                    "update: expected new_scale without requires_grad, got one that requires "
                    "gradients. Detach it.");
}

void check_history_size(const char* function, int64_t history_size) {
  TORCH_CHECK_VALUE(history_size >= 0 && history_size <= kMaxHistorySize, function,
                    ": expected 0 <= history_size < 2^24, got ", history_size);
}

void check_within_bounds(const char* function, const char* argument, const ScaleRules& rules,
                         double value) {
  TORCH_CHECK_VALUE(!rules.min_scale || value >= *rules.min_scale, function, ": expected ",
                    argument, " >= min_scale (", *rules.min_scale, "), got ", value);
  TORCH_CHECK_VALUE(!rules.max_scale || value <= *rules.max_scale, function, ": expected ",
                    argument, " <= max_scale (", *rules.max_scale, "), got ", value);
}

void check_extras(const char* function, const ScaleRules& rules, std::optional<double> scale) {
  TORCH_CHECK_VALUE(!rules.min_scale || (*rules.min_scale > 0 && std::isfinite(*rules.min_scale)),
                    function, ": expected a finite min_scale > 0, got ", *rules.min_scale);
  TORCH_CHECK_VALUE(!rules.max_scale || (*rules.max_scale > 0 && std::isfinite(*rules.max_scale)),
                    function, ": expected a finite max_scale > 0, got ", *rules.max_scale);
  TORCH_CHECK_VALUE(!rules.min_scale || !rules.max_scale || *rules.min_scale <= *rules.max_scale,
                    function, ": expected max_scale >= min_scale (", *rules.min_scale, "), got ",
                    *rules.max_scale);
  check_count(function, "hysteresis", rules.hysteresis, 1);
  check_count(function, "fast_growth_interval", rules.fast_growth_interval, 0);
  if (scale) {
    check_within_bounds(function, "init_scale", rules, *scale);
  }
}

void check_counts(const char* function, const GradScalerState& state) {
  check_scale(function, "scale", state.scale);
  check_count(function, "growth_tracker", state.growth_tracker, 0);
  check_count(function, "hysteresis_tracker", state.hysteresis_tracker, 0);
  check_count(function, "fast_growth_interval", state.fast_growth_interval, 1);
  const double limit = state.fast_growth_limit.value_or(0.0);
  TORCH_CHECK_VALUE(std::isinf(limit) || is_finite_in_float32(limit), function,
                    ": expected fast_growth_limit to be inf or in float32, got ", limit);
}

void check_notes(const char* function, const GradScalerState& state) {
  TORCH_CHECK_VALUE(state.skipped_in_a_row >= 0, function, ": expected skipped_in_a_row >= 0, got ",
                    state.skipped_in_a_row);
  auto expected = state.history.empty() ? 0 : state.history.front().step;
  TORCH_CHECK_VALUE(expected >= 0, function, ": expected steps >= 0 in history, got ", expected);
  for (const auto& record : state.history) {
    TORCH_CHECK_VALUE(record.step == expected, function,
                      ": expected consecutive steps in history, got ", record.step, " where ",
                      expected, " was due");
    ++expected;
  }
}

}  // namespace fastamp::scaler
