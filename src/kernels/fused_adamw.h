// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/functors/adam.h"
#include "kernels/step_entries.h"

#include <ATen/core/List.h>

#include <vector>

namespace fastamp::kernels {

/// Arguments of fastamp::fused_adamw_, in the order of its schema.
struct FusedAdamwArgs {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList exp_avgs;
  at::TensorList exp_avg_sqs;
  at::TensorList max_exp_avg_sqs;
  at::TensorList state_steps;
  at::TensorList masters;
  at::IntArrayRef group_sizes;
  at::ArrayRef<double> lr;
  at::ArrayRef<double> beta1;
  at::ArrayRef<double> beta2;
  at::ArrayRef<double> eps;
  at::ArrayRef<double> weight_decay;
  const c10::List<bool>& decoupled;
  const c10::List<bool>& amsgrad;
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
  at::TensorList moment_scales{};

  StepArgs common() const;
};

/// Reads the learning rates that are on the host.
std::vector<AdamConstants> adam_constants(const FusedAdamwArgs& args);

/// The op on a device. The arguments have passed its checks (src/ops), which left the entries.
void fused_adamw_cpu(const FusedAdamwArgs& args, StepEntries entries);
void fused_adamw_cuda(const FusedAdamwArgs& args, StepEntries entries);

}  // namespace fastamp::kernels
