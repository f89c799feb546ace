#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace fastamp::autocast {

/// Casts the data of a plain tensor, without autograd. Same sizes, strides and values as
/// `tensor.to(to)`.
///
/// Small dense CPU tensors are converted right here: the two trips through the dispatcher and the
/// tensor iterator that `to` takes cost ten times the conversion.
at::Tensor cast_data(const at::Tensor& tensor, c10::ScalarType to);

}  // namespace fastamp::autocast
