// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace fastamp::autocast {

/// Casts a tensor for an op of a region, through the stores of casts that may be used again.
///
/// @param tensor  Any tensor that autocast may cast, with another dtype than `to`.
/// @param to      Dtype the op runs in.
/// @param lower   The region's dtype; only casts to it are kept or shared.
/// @param share   Whether the cast may share memory with other casts of the tensor: false for ops
///                that can return an argument as it is.
at::Tensor cast(const at::Tensor& tensor, c10::ScalarType to, c10::ScalarType lower, bool share);

}  // namespace fastamp::autocast
