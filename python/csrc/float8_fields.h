// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/float8.h>

#include <c10/core/ScalarType.h>

#include <string>
#include <tuple>
#include <vector>

namespace fastamp::python {

/// The fields of Python's Float8Recipe, in its order.
using Float8Fields = std::tuple<c10::ScalarType, c10::ScalarType, Float8Recipe::FastAccumulate,
                                std::vector<std::string>, double, std::string>;

/// @throws c10::ValueError if the scale is none of the two.
Float8Recipe to_recipe(const Float8Fields& fields);
Float8Fields to_fields(const Float8Recipe& recipe);

}  // namespace fastamp::python
