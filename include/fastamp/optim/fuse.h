#pragma once

#include <fastamp/export.h>
#include <fastamp/optim/step_gate.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/optim/optimizer.h>

namespace fastamp::optim {

/// Lets an existing optimizer of LibTorch's be carried by the fused step from now on.
///
/// C++ objects do not change their class, so step() remains torch's own; what changes is the state,
/// which is kept with a step counter on the device, so that fused_step() can step it behind a gate
/// without waiting for anything. The optimizer itself, its groups, its
/// options, references to them and LR schedulers made before or after stay as they are;
/// torch::save and torch::load work as before and exchange torch's own format.
///
/// Do not mix in calls of the optimizer's own step(): call unfuse() before them. (On CUDA its
/// host-side step count stands still while fused; on the CPU it is kept.)
///
/// @param optimizer  Of exactly the type torch::optim::SGD, Adam or AdamW, over float32 parameters
///                   on cpu or cuda. One that is fused already, or a fastamp::optim one, is left
///                   alone.
/// @returns optimizer
/// @throws c10::TypeError   another type of optimizer or parameter. Nothing was changed.
FASTAMP_API torch::optim::Optimizer& fuse(torch::optim::Optimizer& optimizer);

/// Whether fuse() would take it.
FASTAMP_API bool can_fuse(const torch::optim::Optimizer& optimizer);

/// Whether fuse() was called on it.
FASTAMP_API bool is_fused(const torch::optim::Optimizer& optimizer);

/// Gives the optimizer back to its own step(): its state is torch's again. Waits for the device.
/// One that is not fused is left alone.
FASTAMP_API void unfuse(torch::optim::Optimizer& optimizer);

/// One step of a fused optimizer behind a gate; nothing waits. A parameter that is listed twice is
/// stepped once; the optimizer's own step() steps it twice.
/// @param optimizer  One that fuse() was called on.
/// @param gate  What is done to the gradients, and whether the step is skipped.
/// @param learning_rates  Empty, or a tensor for each group that replaces the options' rate.
/// @throws c10::ValueError  the optimizer is not fused, or what ops::fused_sgd_ and fused_adamw_
///     refuse. No parameter was changed.
FASTAMP_API void fused_step(torch::optim::Optimizer& optimizer, const StepGate& gate = {},
                            at::ArrayRef<at::Tensor> learning_rates = {});

}  // namespace fastamp::optim
