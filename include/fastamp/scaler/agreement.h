#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastamp {

/// Makes an overflow flag the same on all ranks: whatever overflows on one is skipped on all.
///
/// GradScaler calls it once for each optimizer and iteration, whatever gradients the rank holds
/// (and again if gradients were edited after a clip that waits for the step), with an fp32 scalar
/// on the device of the scale that is not 0 if this rank overflowed. It has to leave there, in
/// place, something that is not 0 on every rank if it was not 0 on any. On CUDA it should enqueue
/// its work on the current stream and not wait for it. What it throws passes through the call on
/// the scaler.
///
/// agree_over() in <fastamp/scaler/process_group.h> makes one of a c10d::ProcessGroup.
using FlagAgreement = std::function<void(const at::Tensor& found_inf)>;

}  // namespace fastamp
