// SPDX-License-Identifier: Apache-2.0
#include "float8/plan.h"

#include "autocast/cast_node.h"
#include "float8/decision.h"
#include "float8/recipe.h"

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <string>
#include <utility>

namespace fastamp::autocast {
namespace {

constexpr std::int64_t kMultiple = 16;

/// Bytes of one operand's fp8 cast: float32.
constexpr std::int64_t kScaleBytes = 4;

thread_local Float8Calls* t_calls = nullptr;

}  // namespace

Float8PlanRow float8_plan_row(const Float8Shape& shape, Float8Outcome outcome,
                              c10::ScalarType base_dtype, NewOperands is_new) {
  const bool keeps_x = shape.weight_gradient;
  const bool keeps_weight = shape.x_gradient && is_new.weight;
  Float8PlanRow row{.shape = shape, .float8 = std::string(to_string(outcome))};
  // The casts to 16 bits are shared by the calls of a region, and a weight that is in 16 bits is
  // there anyway. So is the fp8 cast of a weight, and that of an activation by calls that follow
  // one another.
  if (keeps_x && is_new.x) {
    row.base_dtype_saved_bytes += 2 * shape.m * shape.k;
  }
  if (keeps_weight && shape.weight_dtype != base_dtype) {
    row.base_dtype_saved_bytes += 2 * shape.n * shape.k;
  }
  if (outcome != Float8Outcome::kRan) {
    row.saved_bytes = row.base_dtype_saved_bytes;
    return row;
  }
  if (keeps_x && is_new.x_in_float8) {
    row.saved_bytes += (shape.m + kMultiple - 1) / kMultiple * kMultiple * shape.k + kScaleBytes;
  }
  if (keeps_weight) {
    row.saved_bytes += shape.n * shape.k + kScaleBytes;
  }
  return row;
}

void Float8Calls::start() {
  if (!std::exchange(is_started_, true)) {
    outer_ = std::exchange(t_calls, this);
  }
}

void Float8Calls::stop() {
  if (std::exchange(is_started_, false)) {
    t_calls = std::exchange(outer_, nullptr);
  }
}

Float8Calls* Float8Calls::current() { return t_calls; }

bool Float8Calls::is_new_in_float8(const at::Tensor& x, bool is_kept) {
  const bool is_shared = last_x_.is_same(x) && !x.is_leaf() && is_recorded(x);
  if (!is_shared) {
    last_x_ = is_kept ? x : at::Tensor();  // Without the transpose, the next call casts anew.
  }
  return !is_shared;
}

bool Float8Calls::is_new(const at::Tensor& tensor) {
  held_.push_back(tensor);
  return saved_.emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()).second;
}

void Float8Calls::add(Float8Op op, Float8Outcome outcome, c10::ScalarType base_dtype,
                      const at::Tensor& x, const at::Tensor& weight, const Float8Shape& shape) {
  const bool keeps_x = shape.weight_gradient;
  const NewOperands is_new_here{
      .x = keeps_x && is_new(x),
      .x_in_float8 = outcome == Float8Outcome::kRan && is_new_in_float8(x, keeps_x),
      .weight = shape.x_gradient && is_new(weight)};
  calls_.push_back({op, float8_plan_row(shape, outcome, base_dtype, is_new_here), weight});
}

void Float8Calls::add(Float8Op op, Float8Outcome outcome, const at::Tensor& weight) {
  Float8PlanRow row;
  row.float8 = to_string(outcome);
  calls_.push_back({op, std::move(row), weight});
}

}  // namespace fastamp::autocast

namespace fastamp {

std::vector<Float8PlanRow> float8_plan(const std::vector<Float8Shape>& shapes,
                                       const Float8Recipe& recipe, c10::ScalarType base_dtype) {
  const auto& setting = *autocast::float8_setting("float8_plan", recipe, base_dtype);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto& [m, k, n, x_dtype, weight_dtype, x_gradient, weight_gradient] = shapes[i];
    TORCH_CHECK_VALUE(m >= 0 && k >= 0 && n >= 0, "float8_plan: expected sizes of shapes[", i,
                      "] to be at least 0, got m ", m, ", k ", k, ", n ", n, ".");
  }
  std::vector<Float8PlanRow> rows;
  rows.reserve(shapes.size());
  for (const auto& shape : shapes) {
    const auto outcome = autocast::float8_outcome(shape, setting, c10::kCUDA);
    rows.push_back(autocast::float8_plan_row(shape, outcome, setting.base_dtype));
  }
  return rows;
}

}  // namespace fastamp
