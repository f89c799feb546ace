// SPDX-License-Identifier: Apache-2.0
#include "autocast/float8_calls.h"

#include "autocast/cast_node.h"
#include "autocast/float8_rule.h"

#include <string>
#include <utility>

namespace fastamp::autocast {
namespace {

constexpr std::int64_t kMultiple = 16;

/// Of one operand's fp8 cast: float32.
constexpr std::int64_t kScaleBytes = 4;

thread_local Float8Calls* t_calls = nullptr;

/// What backward needs of a call, and what of it no earlier call has kept.
struct Kept {
  bool x;
  bool weight;
  bool x_is_new;         ///< In 16 bits,
  bool x_is_new_in_fp8;  ///< and in fp8.
  bool weight_is_new;
};

/// The casts to 16 bits of x and the weight are shared by the calls of a region, and a weight that
/// is in 16 bits is there anyway. So is the fp8 cast of a weight, and that of an activation by
/// calls that follow one another.
void add_saved_bytes(Float8PlanRow& row, c10::ScalarType carrier, bool in_float8, Kept kept) {
  const auto& shape = row.shape;
  if (kept.x && kept.x_is_new) {
    row.carrier_saved_bytes += 2 * shape.m * shape.k;
  }
  if (kept.weight && kept.weight_is_new && shape.weight_dtype != carrier) {
    row.carrier_saved_bytes += 2 * shape.n * shape.k;
  }
  if (!in_float8) {
    row.saved_bytes = row.carrier_saved_bytes;
    return;
  }
  if (kept.x && kept.x_is_new_in_fp8) {
    row.saved_bytes += (shape.m + kMultiple - 1) / kMultiple * kMultiple * shape.k + kScaleBytes;
  }
  if (kept.weight && kept.weight_is_new) {
    row.saved_bytes += shape.n * shape.k + kScaleBytes;
  }
}

Float8PlanRow row_of(const Float8Shape& shape, Float8Outcome outcome, const Float8Setting& setting,
                     const Float8Gpu* gpu, Kept kept) {
  Float8PlanRow row{.shape = shape, .float8 = std::string(to_string(outcome))};
  add_saved_bytes(row, setting.carrier, outcome == Float8Outcome::ran, kept);
  if (gpu != nullptr && shape.m > 0 && shape.k > 0 && shape.n > 0) {
    const auto predicted = predict_float8(*gpu, shape, setting.carrier, setting.scale);
    row.carrier_seconds = predicted.carrier_seconds;
    row.float8_seconds = predicted.float8_seconds;
    row.gain = predicted.gain;
  }
  return row;
}

}  // namespace

bool is_float8_operand(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kBFloat16 || dtype == c10::kHalf;
}

Float8Outcome float8_outcome(const Float8Shape& shape, const Float8Setting& setting,
                             const Float8Gpu* gpu) {
  if (!is_float8_operand(shape.x_dtype) || !is_float8_operand(shape.weight_dtype)) {
    return Float8Outcome::dtype;
  }
  if (shape.m == 0 || shape.k == 0 || shape.n == 0) {
    return Float8Outcome::empty;
  }
  if (shape.k % kMultiple != 0 || shape.n % kMultiple != 0) {
    return Float8Outcome::shape;
  }
  const bool pays =
      gpu == nullptr || shape.m == kUnknownRows || setting.min_gain == 0 ||
      predict_float8(*gpu, shape, setting.carrier, setting.scale).gain >= setting.min_gain;
  return pays ? Float8Outcome::ran : Float8Outcome::gain;
}

Float8PlanRow float8_plan_row(const Float8Shape& shape, Float8Outcome outcome,
                              const Float8Setting& setting, const Float8Gpu* gpu) {
  return row_of(shape, outcome, setting, gpu,
                {.x = shape.weight_gradient,
                 .weight = shape.x_gradient,
                 .x_is_new = true,
                 .x_is_new_in_fp8 = true,
                 .weight_is_new = true});
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

void Float8Calls::add(Float8Call call, Float8Outcome outcome, const Float8Setting& setting,
                      const at::Tensor& x, const std::optional<Float8Shape>& shape) {
  call.row.float8 = to_string(outcome);
  if (shape.has_value()) {
    const bool keeps_x = is_recorded(call.weight);
    const bool keeps_weight = is_recorded(x);
    call.row =
        row_of(*shape, outcome, setting, gpu_on(x.device()),
               {.x = keeps_x,
                .weight = keeps_weight,
                .x_is_new = keeps_x && is_new(x),
                .x_is_new_in_fp8 = outcome == Float8Outcome::ran && is_new_in_float8(x, keeps_x),
                .weight_is_new = keeps_weight && is_new(call.weight)});
  }
  calls_.push_back(std::move(call));
}

void Float8Calls::add(Float8Op op, Float8Outcome outcome) {
  Float8PlanRow row;
  row.float8 = to_string(outcome);
  calls_.push_back({.op = op, .row = std::move(row), .weight = {}});
}

}  // namespace fastamp::autocast
