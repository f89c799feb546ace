#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace fastamp::autocast {

/// Casts the data of a plain tensor, without autograd. Same sizes, strides and values as
/// `tensor.to(to)`.
///
/// Small dense CPU tensors are converted right here: the two trips through the dispatcher and the
/// tensor iterator that `to` takes cost ten times the conversion.
at::Tensor cast_data(const at::Tensor& tensor, c10::ScalarType to);

/// The same for dense float32 tensors on one device, on CUDA in one launch.
std::vector<at::Tensor> cast_data_together(const std::vector<at::Tensor>& tensors,
                                           c10::ScalarType to);

}  // namespace fastamp::autocast
