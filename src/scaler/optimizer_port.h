// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"
#include "scaler/optimizer_record.h"

#include <fastamp/optim/step_gate.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fastamp::scaler {

enum class Stage : std::uint8_t { kReady, kUnscaled, kStepped };

/// What the gradients of an optimizer are gathered for.
enum class Purpose : std::uint8_t {
  kUnscale,   ///< A pass that writes them comes next; fp16 ones are refused.
  kCheck,     ///< A pass that reads them comes next.
  kNorm,      ///< Their norm: sparse ones are replaced by their coalesced form.
  kMultiply,  ///< Any operator.
};

/// The gradients of an optimizer.
struct Gathered {
  std::vector<DeviceGradients> groups;
  bool has_foreign = false;  ///< There are others, of Python tensor subclasses.
};

/// An optimizer as ScalerCore sees it: one adapter for LibTorch's and one for Python's. Made for
/// one call. What it says of an optimizer's iteration is kept where users of its language expect
/// it.
class OptimizerPort {
 public:
  OptimizerPort() = default;
  OptimizerPort(const OptimizerPort&) = delete;
  OptimizerPort& operator=(const OptimizerPort&) = delete;
  virtual ~OptimizerPort() = default;

  /// What its record is found by: its address.
  virtual std::intptr_t key() const = 0;
  virtual std::unique_ptr<OptimizerHandle> make_handle() = 0;
  /// Whether a handle that was found by key() is its own, and not one's that was destroyed.
  virtual bool owns(const OptimizerHandle& handle) const = 0;

  virtual Stage stage(const OptimizerRecord& record) const = 0;
  virtual std::vector<at::Tensor> flags(const OptimizerRecord& record) const = 0;
  /// Takes the result of a pass: one fp32 flag per device.
  virtual void set(OptimizerRecord& record, Stage stage, const std::vector<at::Tensor>& flags) = 0;
  virtual void set_stepped(OptimizerRecord& record) = 0;
  /// Takes back what a refused call has set.
  virtual void reset(OptimizerRecord& record) = 0;

  /// Collects the gradients and notes in the record whether two parameters have one.
  /// @throws c10::ValueError for fp16 gradients, where those are refused.
  virtual Gathered gather(OptimizerRecord& record, Purpose purpose) = 0;
  /// Whether there are gradients and `visit` is true of each; false if that cannot be told.
  virtual bool all_gradients(c10::function_ref<bool(const at::Tensor&)> visit) const = 0;
  /// Whether the gradients may be left scaled until the step.
  virtual bool may_check() const = 0;
  /// Unscales as a user's call of unscale_ would.
  virtual void unscale() = 0;
  /// Called first when gradients are unscaled in place.
  virtual void begin_unscale(OptimizerRecord& /*record*/) {}
  /// An fp32 scalar beside the scale for a pass to overwrite: without a value, or the flag of an
  /// earlier pass that nobody holds.
  virtual at::Tensor flag_for_pass(OptimizerRecord& record, const at::Tensor& scale) = 0;
  /// Runs a pass, which calls no code of users.
  virtual void run(c10::function_ref<void()> pass) = 0;
  /// A pass has unscaled the gradients in place.
  virtual void unscaled_by(const std::shared_ptr<PassResult>& /*pass*/) {}

  /// The dtype of a 2-norm of these gradients.
  virtual c10::ScalarType norm_dtype(const std::vector<DeviceGradients>& groups) const = 0;
  /// torch's norm of any order, of all kinds of gradients that gather() found last.
  virtual at::Tensor torchs_norm(const Gathered& gathered, double norm_type) = 0;
  virtual void multiply_foreign(const at::Tensor& /*factor*/) {}
  virtual void clamp(OptimizerRecord& record, double clip_value) = 0;
  /// Refuses a norm that is not finite. sync: waits for the device.
  virtual void check_finite(const at::Tensor& norm, double norm_type) const = 0;

  /// Calls the optimizer's step behind a gate.
  virtual void step(const optim::StepGate& gate) = 0;
};

}  // namespace fastamp::scaler
