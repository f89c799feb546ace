// SPDX-License-Identifier: Apache-2.0
#include "float8/float8_calls.h"
#include "float8/recipe.h"

#include <fastamp/autocast/float8_plan.h>

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <cstddef>

namespace fastamp {

std::vector<Float8PlanRow> float8_plan(const std::vector<Float8Shape>& shapes,
                                       const Float8Recipe& recipe, c10::ScalarType carrier) {
  const auto& setting = *autocast::float8_setting("float8_plan", recipe, carrier);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto& [m, k, n, x_dtype, weight_dtype, x_gradient, weight_gradient] = shapes[i];
    TORCH_CHECK_VALUE(m >= 0 && k >= 0 && n >= 0, "float8_plan: expected sizes of shapes[", i,
                      "] to be at least 0, got m ", m, ", k ", k, ", n ", n, ".");
  }
  std::vector<Float8PlanRow> rows;
  rows.reserve(shapes.size());
  for (const auto& shape : shapes) {
    const auto outcome = autocast::float8_outcome(shape, setting, c10::kCUDA);
    rows.push_back(autocast::float8_plan_row(shape, outcome, setting.carrier));
  }
  return rows;
}

}  // namespace fastamp
