#pragma once

#include <ATen/core/Tensor.h>

namespace fastamp::autocast {

/// The tensor that `tensor` is a view of, if both are ordinary, lie densely in memory and have the
/// same elements there, such as `weight.t()` or `weight.view({rows, -1})` of a weight. Else null.
///
/// Casting the one then writes the same bytes as casting the other.
const at::Tensor* base_of_whole_view(const at::Tensor& tensor);

}  // namespace fastamp::autocast
