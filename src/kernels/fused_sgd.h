// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/sgd.h"
#include "kernels/step_entries.h"

#include <ATen/core/List.h>

#include <vector>

namespace fastamp::kernels {

/// Arguments of fastamp::fused_sgd_, in the order of its schema.
struct FusedSgdArgs {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList momentum_buffers;
  at::TensorList momentum_steps;
  at::TensorList masters;
  at::IntArrayRef group_sizes;
  at::ArrayRef<double> lr;
  at::ArrayRef<double> momentum;
  at::ArrayRef<double> dampening;
  at::ArrayRef<double> weight_decay;
  const c10::List<bool>& nesterov;
  const c10::List<bool>& maximize;
  at::TensorList lr_tensors;
  at::TensorList weight_copies;
  at::IntArrayRef copy_of;
  const std::optional<at::Tensor>& inv_scale;
  const std::optional<at::Tensor>& clip_coef;
  const std::optional<at::Tensor>& found_inf;
  std::optional<double> clip_value;
  bool write_grads;
  at::IntArrayRef noise_origins{};

  StepArgs common() const;
};

/// Reads the learning rates that are on the host.
std::vector<SgdConstants> sgd_constants(const FusedSgdArgs& args);

/// The op on a device. The arguments have passed its checks (src/ops), which left the entries.
void fused_sgd_cpu(const FusedSgdArgs& args, StepEntries entries);
void fused_sgd_cuda(const FusedSgdArgs& args, StepEntries entries);

}  // namespace fastamp::kernels
