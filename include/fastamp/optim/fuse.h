// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/optim/optimizer.h>

namespace fastamp::optim {

/// Prepares an existing optimizer of LibTorch's for fused_step().
///
/// A C++ object cannot change its class, so step() remains torch's own. What changes is the state:
/// its step counter is then on the device, so that fused_step() can step it with an AmpStep without
/// waiting. The optimizer itself, its groups and options, references to them and LR schedulers made
/// before or after stay as they are; torch::save and torch::load work as before and exchange
/// torch's own format.
///
/// Do not call the optimizer's own step() while it is fused: call unfuse_() first. (On CUDA
/// LibTorch's step count on the host stands still while fused; on the CPU it is kept up to date.)
///
/// @param optimizer  Of exactly the type torch::optim::SGD, Adam or AdamW, over float32 parameters
///                   on cpu or cuda. An optimizer that is fused already, or one of fastamp::optim,
///                   is left alone.
/// @returns optimizer
/// @throws c10::TypeError   another type of optimizer or parameter. Nothing was changed.
FASTAMP_API torch::optim::Optimizer& fuse_(torch::optim::Optimizer& optimizer);

/// Whether fuse_() would accept the optimizer.
FASTAMP_API bool can_fuse(const torch::optim::Optimizer& optimizer);

/// Whether the optimizer is fused now.
FASTAMP_API bool is_fused(const torch::optim::Optimizer& optimizer);

/// Gives the optimizer back to its own step(): its state is torch's again. Waits for the device.
/// An optimizer that is not fused is left alone.
FASTAMP_API void unfuse_(torch::optim::Optimizer& optimizer);

/// One step of a fused optimizer, without waiting. A parameter that is listed twice
/// is stepped once; the optimizer's own step() steps it twice.
/// @param optimizer  A fused optimizer.
/// @param amp_step  What is done to the gradients, and whether the step is skipped.
/// @param learning_rates  Empty, or a tensor for each group that replaces the options' rate.
/// @throws c10::ValueError  the optimizer is not fused, or what ops::fused_sgd_ and fused_adamw_
///     refuse. No parameter was changed.
FASTAMP_API void fused_step(torch::optim::Optimizer& optimizer, const AmpStep& amp_step = {},
                            at::ArrayRef<at::Tensor> learning_rates = {});

}  // namespace fastamp::optim
