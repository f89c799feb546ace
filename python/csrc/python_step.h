// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/weight_copies.h"
#include "scaler/gradient_pass.h"

#include <fastamp/optim/amp_step.h>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

// Steps of Python's optimizers: the AmpStep that a scaler hands over, and the step that takes it.
namespace fastamp::python {

namespace py = pybind11;

/// The Python form of an AmpStep, `fastamp._C.AmpStep`: with its copies on other devices.
class PythonAmpStep {
 public:
  /// @param pass         Over the gradients that the step is for; may be null.
  /// @param by_position  It lists the gradients that the optimizer's parameters have now, each at
  ///     the position of its parameter.
  explicit PythonAmpStep(optim::AmpStep amp_step,
                         std::shared_ptr<scaler::PassResult> pass = nullptr,
                         bool by_position = false)
      : amp_step_(std::move(amp_step)), pass_(std::move(pass)), by_position_(by_position) {}

  const optim::AmpStep& amp_step() const { return amp_step_; }
  /// Returns it with its tensors on a device; one copy per device is kept.
  std::shared_ptr<PythonAmpStep> for_device(c10::Device device);
  /// The pass that lists the gradients of the parameters; null if they are to be read there. The
  /// list is good for one step.
  std::shared_ptr<const scaler::PassResult> take_gradients() {
    return std::exchange(by_position_, false) ? pass_ : nullptr;
  }
  /// Notes that code of others runs before the step, which then reads gradients from parameters.
  void forget_positions() { by_position_ = false; }
  /// Lets the gradients go when they were stepped.
  void end() const {
    if (pass_ != nullptr) {
      pass_->forget();
    }
  }

 private:
  optim::AmpStep amp_step_;
  std::shared_ptr<scaler::PassResult> pass_;
  bool by_position_;
  std::vector<std::pair<c10::Device, std::shared_ptr<PythonAmpStep>>> copies_;
};

/// `optimizer._fastamp_weight_copies`: None, or the dtype of its weight copies and what keeps them.
struct WeightCopyOptions {
  explicit WeightCopyOptions(at::ScalarType to) : dtype(to) {}

  at::ScalarType dtype;
  autocast::WeightCopies weight_copies;
};

/// One step of an optimizer: gathers its parameters, then runs one fused op per device (Muon: its
/// passes), with the GIL released. Called by `_native_step` of fastamp.optim's classes.
/// @param amp_step  fastamp._C.AmpStep or None.
/// @returns (index of group, parameter) of what only torch's own step can do: subclasses other than
///     DTensor, dtypes and layouts without a kernel, differentiable groups. Normally empty.
py::list sgd_step(py::handle optimizer, py::handle amp_step);
py::list adam_step(py::handle optimizer, py::handle amp_step);
py::list muon_step(py::handle optimizer, py::handle amp_step);

}  // namespace fastamp::python
