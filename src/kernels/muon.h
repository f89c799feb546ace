// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two elementwise passes of a Muon step. What is between them, the Newton-Schulz iteration, is
// matrix products (optim/newton_schulz.h).

#include "kernels/functors/muon.h"
#include "kernels/step_entries.h"

#include <ATen/core/List.h>

#include <vector>

namespace fastamp::kernels {

/// Arguments of fastamp::muon_momentum_, in the order of its schema.
struct MuonMomentumArgs {
  at::TensorList grads;
  at::TensorList momentum_buffers;
  at::TensorList updates;
  at::IntArrayRef group_sizes;
  at::ArrayRef<double> momentum;
  const c10::List<bool>& nesterov;
  const std::optional<at::Tensor>& inv_scale;
  const std::optional<at::Tensor>& clip_coef;
  const std::optional<at::Tensor>& found_inf;
  std::optional<double> clip_value;
  bool write_grads;
  at::IntArrayRef noise_origins{};
  at::TensorList momentum_steps{};

  /// The updates in place of parameters, as they are what the pass writes, and momenta for rates.
  StepArgs common() const;
};

/// The entry of one update: its tensor is kWeight and, for its dtype's sake, kHalf.
/// @param count  Its counter, if it has noise.
StepEntry momentum_entry(const MuonMomentumArgs& args, std::size_t index, std::size_t group,
                         const at::Tensor* count = nullptr);

/// The same of fastamp::muon_apply_.
struct MuonApplyArgs {
  at::TensorList params;
  at::TensorList updates;
  at::TensorList masters;
  at::IntArrayRef group_sizes;
  at::ArrayRef<double> lr;
  at::ArrayRef<double> ratio;
  at::ArrayRef<double> weight_decay;
  at::TensorList lr_tensors;
  at::TensorList weight_copies;
  at::IntArrayRef copy_of;
  const std::optional<at::Tensor>& found_inf;

  /// The updates in place of gradients, which are only read.
  StepArgs common() const;
};

std::vector<MuonMomentumConstants> momentum_constants(const MuonMomentumArgs& args);
/// Reads the learning rates that are on the host.
std::vector<MuonApplyConstants> apply_constants(const MuonApplyArgs& args);

/// The ops on a device. The arguments have passed their checks (src/ops), which left the entries.
void muon_momentum_cpu(const MuonMomentumArgs& args, StepEntries entries);
void muon_momentum_cuda(const MuonMomentumArgs& args, StepEntries entries);
void muon_apply_cpu(const MuonApplyArgs& args, StepEntries entries);
void muon_apply_cuda(const MuonApplyArgs& args, StepEntries entries);

}  // namespace fastamp::kernels
