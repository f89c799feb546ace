// SPDX-License-Identifier: Apache-2.0
#pragma once

// LibTorch's optimizers for ScalerCore: their records, gradients and steps.

#include "scaler/gradient_groups.h"
#include "scaler/optimizer_record.h"

#include <fastamp/optim/amp_step.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace fastamp::scaler {

class ScalerCore;
struct NormClip;
struct ScalerCall;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Record of one of LibTorch's optimizers. It is known again by its parameters: LibTorch
/// notifies nobody when an optimizer is destroyed, and another one may come to live at its address.
struct LibTorchHandle final : OptimizerHandle {
  const torch::optim::Optimizer* optimizer = nullptr;  ///< Where it was; not to be read.
  std::vector<WeakTensor> parameters;

  /// Whether all parameters are gone, and with them the optimizer.
  bool is_gone() const override;
};

LibTorchHandle& handle_of(const OptimizerRecord& record);

/// The record of an optimizer; null if it has none.
RecordPointer find_record(const ScalerCore& core, const torch::optim::Optimizer& optimizer);
/// Returns it; a new one if it has none.
RecordPointer record_of(ScalerCore& core, const torch::optim::Optimizer& optimizer);

/// Collects the gradients, sparse ones as their coalesced values, and notes in the record which
/// parameters there are.
/// @throws c10::ValueError for fp16 gradients, if they are to be unscaled.
/// @throws c10::NotImplementedError for a Python tensor subclass.
Gathered gather(const torch::optim::Optimizer& optimizer, OptimizerRecord& record, Purpose purpose);

/// Whether a gradient is sparse: it is stepped as a dense copy, and so not clipped by the step.
bool has_sparse(const torch::optim::Optimizer& optimizer);

/// Whether all gradients are others than those of the last pass, and scale() was called since:
/// then a new backward pass has made them, and they are scaled.
bool is_scaled_anew(const torch::optim::Optimizer& optimizer, const OptimizerRecord& record,
                    const ScalerCall& call);

/// Clips unscaled gradients as it was put off to the step.
void apply_clips(const torch::optim::Optimizer& optimizer, OptimizerRecord& record);
void clip_values(const torch::optim::Optimizer& optimizer, OptimizerRecord& record,
                 double clip_value);

/// Clips unscaled gradients by their norm. Called by clip_grad_norm_() of scaler and guard.
/// @param call  Null: of a disabled scaler, which agrees with nobody.
/// @return The norm; undefined if there are no gradients.
at::Tensor clip_unscaled(const torch::optim::Optimizer& optimizer, OptimizerRecord& record,
                         const NormClip& clip, bool at_step, const ScalerCall* call);

/// Whether an optimizer can be stepped with an AmpStep; fuses it first if that is asked for.
bool supports_amp_step(torch::optim::Optimizer& optimizer, bool fuse);
/// Steps such an optimizer. Called by GradScaler::step() and StepGuard::step().
at::Tensor step_with(torch::optim::Optimizer& optimizer, const optim::AmpStep& amp_step);

/// Calls optimizer.step(closure) and has the casts of its weights forgotten if they may have been
/// written without moving version counters, as LibTorch's optimizers write them; also if it throws,
/// and before each call of the closure, which such an optimizer makes between its writes.
at::Tensor call_step(torch::optim::Optimizer& optimizer,
                     const torch::optim::Optimizer::LossClosure& closure = nullptr);

}  // namespace fastamp::scaler
