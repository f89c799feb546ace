// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/sgd.h"
#include "kernels/step_entries.h"

#include <fastamp/ops/fused_steps.h>

#include <vector>

namespace fastamp::kernels {

/// The part that all fused steps have.
StepArgs step_args(const ops::FusedSgdArgs& args);

/// Reads the learning rates that are on the host.
std::vector<SgdConstants> sgd_constants(const ops::FusedSgdArgs& args);

/// The op on a device. The arguments have passed its checks (src/ops), which left the entries.
void fused_sgd_cpu(const ops::FusedSgdArgs& args, StepEntries entries);
void fused_sgd_cuda(const ops::FusedSgdArgs& args, StepEntries entries);

}  // namespace fastamp::kernels
