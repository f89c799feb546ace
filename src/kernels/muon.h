// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two elementwise passes of a Muon step. What is between them, the Newton-Schulz iteration, is
// matrix products (optim/newton_schulz.h).

#include "kernels/functors/muon.h"
#include "kernels/fused_steps.h"

#include <fastamp/ops/fused_steps.h>

#include <vector>

namespace fastamp::kernels {

/// The part that all fused steps have: the updates in place of parameters, as they are what the
/// pass writes, and momenta for rates.
StepArgs step_args(const ops::MuonMomentumArgs& args);
/// Arguments: the updates in place of gradients, which are only read.
StepArgs step_args(const ops::MuonApplyArgs& args);

/// The entry of one update: its tensor is kWeight and, for its dtype's sake, kHalf.
/// @param count  Its counter, if it has noise.
StepEntry momentum_entry(const ops::MuonMomentumArgs& args, std::size_t index, std::size_t group,
                         const at::Tensor* count = nullptr);

std::vector<MuonMomentumConstants> momentum_constants(const ops::MuonMomentumArgs& args);
/// Reads the learning rates that are on the host.
std::vector<MuonApplyConstants> apply_constants(const ops::MuonApplyArgs& args);

/// The ops on a device. The arguments have passed their checks (src/ops), which left the entries.
void muon_momentum_cpu(const ops::MuonMomentumArgs& args, StepEntries entries);
void muon_momentum_cuda(const ops::MuonMomentumArgs& args, StepEntries entries);
void muon_apply_cpu(const ops::MuonApplyArgs& args, StepEntries entries);
void muon_apply_cuda(const ops::MuonApplyArgs& args, StepEntries entries);

}  // namespace fastamp::kernels
