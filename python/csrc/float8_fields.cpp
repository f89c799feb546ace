// SPDX-License-Identifier: Apache-2.0
#include "float8_fields.h"

#include <c10/util/Exception.h>

namespace fastamp::python {

Float8Recipe to_recipe(const Float8Fields& fields) {
  const auto& [forward_dtype, grad_dtype, fast_accumulate, ops, min_gain, scale] = fields;
  TORCH_CHECK_VALUE(scale == "current" || scale == "predicted",
                    "Float8Recipe: expected scale to be 'current' or 'predicted', got '", scale,
                    "'.");
  return Float8Recipe()
      .forward_dtype(forward_dtype)
      .grad_dtype(grad_dtype)
      .fast_accumulate(fast_accumulate)
      .ops(ops)
      .min_gain(min_gain)
      .scale(scale == "current" ? Float8Scale::current : Float8Scale::predicted);
}

Float8Fields to_fields(const Float8Recipe& recipe) {
  return {
      recipe.forward_dtype(),   recipe.grad_dtype(),
      recipe.fast_accumulate(), recipe.ops(),
      recipe.min_gain(),        recipe.scale() == Float8Scale::current ? "current" : "predicted"};
}

}  // namespace fastamp::python
