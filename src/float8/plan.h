// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/recipe.h"
#include "trace/float8_outcome.h"

#include <fastamp/autocast/float8_plan.h>
#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

// The rows of plans: of products of given sizes, and of the recorded calls of a model. Exported
// for the Python module; not part of the public API.
namespace fastamp::autocast {

/// Operands of a product that no earlier one has kept for backward.
struct NewOperands {
  bool x = true;            ///< In 16 bits,
  bool x_in_float8 = true;  ///< and in fp8.
  bool weight = true;
};

/// The row of a plan for a product with this outcome.
Float8PlanRow float8_plan_row(const Float8Shape& shape, Float8Outcome outcome,
                              c10::ScalarType base_dtype, NewOperands is_new = {});

/// A call of an op that can run in fp8.
struct Float8Call {
  Float8Op op;
  Float8PlanRow row;  ///< Without sizes where the arguments are not x times a weight.
  at::Tensor weight;  ///< A parameter, if the second operand is one or the transpose of one.
};

/// Records such calls of a thread, between start() and stop(), and keeps them in the base dtype.
/// For models of fake tensors: what intercepts calls for their sake does not count as a reason.
class FASTAMP_API Float8Calls {
 public:
  Float8Calls() = default;
  ~Float8Calls() { stop(); }
  Float8Calls(const Float8Calls&) = delete;
  Float8Calls& operator=(const Float8Calls&) = delete;
  Float8Calls(Float8Calls&&) = delete;
  Float8Calls& operator=(Float8Calls&&) = delete;

  /// Records the calls of this thread from now on, in the place of what records them now. Stop it
  /// on the same thread, the last one first.
  void start();
  void stop();
  const std::vector<Float8Call>& calls() const { return calls_; }

  /// Returns what records the calls of this thread; null if nothing does.
  static Float8Calls* current();

  /// A call that is x times a weight.
  void add(Float8Op op, Float8Outcome outcome, c10::ScalarType base_dtype, const at::Tensor& x,
           const at::Tensor& weight, const Float8Shape& shape);
  /// A call with arguments of another form.
  void add(Float8Op op, Float8Outcome outcome, const at::Tensor& weight = {});

 private:
  bool is_new(const at::Tensor& tensor);
  bool is_new_in_float8(const at::Tensor& x, bool is_kept);

  Float8Calls* outer_ = nullptr;
  bool is_started_ = false;
  std::vector<Float8Call> calls_;
  /// Memory that a call has saved in 16 bits already: later ones share it. The tensors are held, so
  /// that their addresses are not used again.
  std::set<std::pair<const void*, std::int64_t>> saved_;
  std::vector<at::Tensor> held_;
  at::Tensor last_x_;  ///< Whose fp8 cast the next call shares, if it takes the same x.
};

}  // namespace fastamp::autocast
