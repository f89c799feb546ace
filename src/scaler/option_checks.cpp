#include "scaler/option_checks.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace fastamp::scaler {

void check_factors(const char* function, const ScaleRules& rules) {
  TORCH_CHECK(!(rules.growth_factor <= 1.0), function, ": expected growth_factor > 1.0, got ",
              rules.growth_factor);
  TORCH_CHECK(!(rules.backoff_factor >= 1.0), function, ": expected backoff_factor < 1.0, got ",
              rules.backoff_factor);
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
  TORCH_CHECK_VALUE(rules.hysteresis >= 1, function, ": expected hysteresis >= 1, got ",
                    rules.hysteresis);
  if (scale) {
    check_within_bounds(function, "init_scale", rules, *scale);
  }
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
