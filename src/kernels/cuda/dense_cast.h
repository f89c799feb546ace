// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace fastamp::kernels::cuda {

/// Casts tensors to 16-bit ones in one launch on the current stream of their device; several
/// launches only under graph capture of more tensors than fit the kernel's arguments.
///
/// @param sources  Dense float32 tensors on one device.
/// @param casts    As many tensors of the same sizes and strides, float16 or bfloat16.
void cast_together(at::TensorList sources, at::TensorList casts);

}  // namespace fastamp::kernels::cuda
