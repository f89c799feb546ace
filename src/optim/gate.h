// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/optim/step_gate.h>

#include <c10/core/Device.h>

namespace fastamp::optim {

/// The gate with its tensors on `device`. Copies between devices do not wait, except to the CPU.
FASTAMP_API StepGate gate_on(const StepGate& gate, c10::Device device);

/// Whether the host can tell, without waiting, that the gate lets a step happen.
bool steps_on_host(const StepGate& gate);

}  // namespace fastamp::optim
