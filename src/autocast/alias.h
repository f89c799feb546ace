#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

namespace fastamp::autocast {

/// A tensor of its own, without history, over memory that holds a tensor with the sizes and strides
/// of `shape`, the dtype `dtype` and the version counter `version`. Runs no op.
///
/// The counter is shared, so that editing one tensor over the memory in place is noticed by all who
/// look at another.
at::Tensor make_alias(c10::Storage memory, const at::Tensor& shape, c10::ScalarType dtype,
                      const c10::VariableVersion& version);

/// An alias of a whole dense tensor.
at::Tensor make_alias(const at::Tensor& tensor);

}  // namespace fastamp::autocast
