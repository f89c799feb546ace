// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Counts how large the numbers of tensors are: a dispatcher op of the same name
/// (torch.ops.fastamp.count_exponents_).

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fastamp::ops {

/// Counts the elements of tensors by their exponents; reads each tensor, or a sample of it, once
/// and writes none.
///
/// A row has 260 numbers. Number e, from 0 to 254, counts the finite elements that are not 0 with
/// 2^(e-127) <= |x| < 2^(e-126) (e = 0: those below 2^-126, which fp32 and bf16 keep as subnormal
/// numbers); number 255 counts inf, 256 NaN and 257 zeros. Number 258 is at least the bits of the
/// greatest finite |x| as fp32, and 259 at least 0x7f800000 less the bits of the smallest |x| that
/// is not 0. Counts are added to what is there and the last two only grow, so a row that starts at
/// zero describes all calls since. The result is exact, and the same for any order, number of
/// threads and device. Bumps the versions of what it writes; never records an autograd node.
///
/// @param tensors    Strided tensors of any shape and strides on one device, float16, bfloat16 or
///                   float32, mixed as they come; the list and its tensors may be empty.
/// @param exponents  int64, contiguous, of shape [number of tensors, 260], or [1, 260] to count all
///                   tensors together; on that device.
/// @param zeros      None, or int64, contiguous, of shape [number of tensors, 1]: the zeros of each
///                   tensor are added to it.
/// @param every      Counts each every-th of the blocks of 2048 elements that a tensor has; the
///                   last may be shorter. Elements are numbered as they lie in memory, or, of a
///                   tensor that is not dense, by its indices.
/// @param phase      Which: block b of tensor i is counted if (b + i) % every is this.
/// @throws c10::TypeError   a dtype is not among those above.
/// @throws c10::ValueError  a tensor is undefined, on another device, not strided, or not of the
///                          shape above; every is below 1, or phase is not in [0, every). Nothing
///                          was changed.
/// @throws c10::NotImplementedError  the tensors are on a device other than CPU and CUDA.
/// @note CUDA: asynchronous on the current stream, no host sync, one launch (while a stream is
///       captured more, as for unscale_and_check_). CPU: uses at::get_num_threads() threads.
///       Thread-safe where the written tensors are disjoint.
FASTAMP_API void count_exponents_(at::TensorList tensors, const at::Tensor& exponents,
                                  const std::optional<at::Tensor>& zeros = std::nullopt,
                                  int64_t every = 1, int64_t phase = 0);

}  // namespace fastamp::ops
