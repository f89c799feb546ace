// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace fastamp::scaler {

/// Calls optimizer.step(closure) and has the casts of its weights forgotten if they may have been
/// written without moving version counters, as LibTorch's optimizers write them; also if it throws,
/// and before each call of the closure, which such an optimizer makes between its writes.
at::Tensor call_step(torch::optim::Optimizer& optimizer,
                     const torch::optim::Optimizer::LossClosure& closure = nullptr);

}  // namespace fastamp::scaler
