// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace fastamp {

/// Scales the gradients of parameters in place so that their norm is at most `max_norm`.
///
/// As torch::nn::utils::clip_grad_norm_, but the norm is a tensor and nothing waits for the device.
/// For the 2-norm gradients are read once, their squares summed in fp64; those that need no scaling
/// are not written. Every gradient is counted and scaled once, also if its parameter is listed
/// twice or shares it with another. Sparse gradients are coalesced first. Not thread-safe for the
/// same gradients.
///
/// Under a GradScaler the gradients have to be unscaled before. GradScaler::clip_grad_norm_() does
/// both, and takes the norm from the pass that checks them.
/// @param parameters  Such as module->parameters(), or one tensor; those without gradients are left
///     out.
/// @param max_norm   Largest norm that is left.
/// @param norm_type  Order of the norm; may be infinite. Orders but 2 are computed by torch.
/// @param error_if_nonfinite  Refuse a norm that is inf or NaN; waits for the device.
/// @returns the norm before clipping, a scalar of the gradients' (promoted) dtype, on the first
///     gradient's device; 0 if there are no gradients.
/// @throws c10::ValueError if a parameter is undefined; c10::Error for a norm that is not finite,
///     if asked to. No gradient was scaled then.
///
/// Source: torch.nn.utils.clip_grad_norm_ (torch 2.11).
FASTAMP_API at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm,
                                       double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace fastamp
