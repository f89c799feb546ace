// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/optim/amp_step.h>

#include <c10/core/Device.h>

namespace fastamp::optim {

/// What a step is asked for, with tensors on `device`. Copies between devices do not wait, except
/// to the CPU.
FASTAMP_API AmpStep amp_step_on(const AmpStep& amp_step, c10::Device device);

/// Whether the host can tell, without waiting, that the step is not skipped.
bool steps_on_host(const AmpStep& amp_step);

}  // namespace fastamp::optim
