// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace fastamp {

/// Notifies autocast that weights were written in a way that their version counters do not show: by
/// LibTorch's own optimizers (through `.data()`), through `.data()` itself or a raw pointer. Their
/// next use in a region casts them again, on every thread, whether the region is open now or not;
/// kept casts and weight copies of them are freed.
///
/// @code
///   fastamp::AutocastGuard region(torch::kCPU);   // stays open across the step
///   loss_of(model, x).backward();
///   optimizer.step();                             // torch::optim::SGD
///   fastamp::weights_changed(optimizer);
/// @endcode
///
/// GradScaler::step() calls it itself, and optimizers of fastamp::optim never need it. Version
/// counters stay as they are: a graph that saved a weight for its backward pass runs it as it would
/// without this call.
///
/// Undefined tensors are ignored. Thread-safe; another thread sees the change once its next op is
/// ordered after the return of this call.
FASTAMP_API void weights_changed(at::TensorList weights);

/// Does so for all parameters of an optimizer.
FASTAMP_API void weights_changed(const torch::optim::Optimizer& optimizer);

}  // namespace fastamp
