#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace fastamp::autocast {

/// Casts a tensor for an op of a region, through the weight cache if it is a weight.
///
/// @param tensor  Any tensor that autocast may cast, with another dtype than `to`.
/// @param to      Dtype the op runs in.
/// @param lower   The region's dtype; only casts to it are kept.
at::Tensor cast(const at::Tensor& tensor, c10::ScalarType to, c10::ScalarType lower);

}  // namespace fastamp::autocast
