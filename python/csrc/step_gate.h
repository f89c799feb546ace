// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/gate.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

namespace fastamp::python {

/// The Python form of a gate, `fastamp._C.StepGate`: with its copies on other devices.
class PythonGate {
 public:
  explicit PythonGate(optim::StepGate gate) : gate_(std::move(gate)) {}

  const optim::StepGate& gate() const { return gate_; }
  /// The same gate with its tensors on a device; one copy per device is kept.
  std::shared_ptr<PythonGate> for_device(c10::Device device);

 private:
  optim::StepGate gate_;
  std::vector<std::pair<c10::Device, std::shared_ptr<PythonGate>>> copies_;
};

/// The gate of a `StepGate`; an open one for None.
optim::StepGate read_gate(pybind11::handle gate);

}  // namespace fastamp::python
