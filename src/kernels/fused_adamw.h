// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/adam.h"
#include "kernels/step_entries.h"

#include <fastamp/ops/fused_steps.h>

#include <vector>

namespace fastamp::kernels {

/// The part that all fused steps have.
StepArgs step_args(const ops::FusedAdamwArgs& args);

/// Reads the learning rates that are on the host.
std::vector<AdamConstants> adam_constants(const ops::FusedAdamwArgs& args);

/// The op on a device. The arguments have passed its checks (src/ops), which left the entries.
void fused_adamw_cpu(const ops::FusedAdamwArgs& args, StepEntries entries);
void fused_adamw_cuda(const ops::FusedAdamwArgs& args, StepEntries entries);

}  // namespace fastamp::kernels
