// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/amp_step_on.h"
#include "scaler/gradient_pass.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

namespace fastamp::python {

/// The Python form of an AmpStep, `fastamp._C.AmpStep`: with its copies on other devices.
class PythonAmpStep {
 public:
  /// @param pass  Over the gradients that the step is for; may be null.
  explicit PythonAmpStep(optim::AmpStep amp_step,
                         std::shared_ptr<scaler::PassResult> pass = nullptr)
      : amp_step_(std::move(amp_step)), pass_(std::move(pass)) {}

  const optim::AmpStep& amp_step() const { return amp_step_; }
  /// The same with its tensors on a device; one copy per device is kept.
  std::shared_ptr<PythonAmpStep> for_device(c10::Device device);
  /// Lets the gradients go when they were stepped.
  void end() const {
    if (pass_ != nullptr) {
      pass_->forget();
    }
  }

 private:
  optim::AmpStep amp_step_;
  std::shared_ptr<scaler::PassResult> pass_;
  std::vector<std::pair<c10::Device, std::shared_ptr<PythonAmpStep>>> copies_;
};

/// What is in a Python AmpStep; for None one that asks for nothing.
optim::AmpStep read_amp_step(pybind11::handle amp_step);

}  // namespace fastamp::python
