// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/float8.h>
#include <fastamp/macros.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fastamp {

/// A linear layer: x of [m, k] times the transpose of a weight [n, k].
struct Float8Shape {
  std::int64_t m = 0;
  std::int64_t k = 0;
  std::int64_t n = 0;
  c10::ScalarType x_dtype = c10::ScalarType::BFloat16;
  c10::ScalarType weight_dtype = c10::ScalarType::Float;
  bool x_gradient = true;       ///< Whether backward computes dX, for which the weight is kept,
  bool weight_gradient = true;  ///< and dW, for which x is.
};

/// Row of a plan: what becomes of one product.
struct Float8PlanRow {
  Float8Shape shape;
  std::string float8;  ///< "float8" if it runs in fp8, else why not, as in a trace.
  std::int64_t base_dtype_saved_bytes = 0;  ///< Kept for backward by a region without a recipe,
  std::int64_t saved_bytes = 0;             ///< and in the way that `float8` says.
};

/// Lists which products of linear layers a region with a recipe runs in fp8 on a GPU, and what
/// backward keeps of their operands. Needs no GPU and computes no product.
///
/// The rows are as if each layer stood alone: layers that share x save less in both ways.
///
/// @param shapes   One for each product.
/// @param recipe   As for a region.
/// @param base_dtype  The region's dtype, bfloat16 or float16.
/// @return A row for each shape, in their order.
/// @throws c10::ValueError if a size is negative, or recipe or base dtype impossible.
FASTAMP_API std::vector<Float8PlanRow> float8_plan(
    const std::vector<Float8Shape>& shapes, const Float8Recipe& recipe = Float8Recipe(),
    c10::ScalarType base_dtype = c10::ScalarType::BFloat16);

}  // namespace fastamp
