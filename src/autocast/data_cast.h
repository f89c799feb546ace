// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/interception.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <vector>

// The data of casts: made from a tensor, or shared with an earlier cast.
namespace fastamp::autocast {

/// Casts the data of a plain tensor, without autograd. Same sizes, strides and values as
/// `tensor.to(to)`.
///
/// Small dense CPU tensors are converted right here: the two trips through the dispatcher and the
/// tensor iterator that `to` takes cost ten times the conversion.
at::Tensor cast_data(const at::Tensor& tensor, c10::ScalarType to);

/// Does so for a tensor of any kind, by the op `to` unless `path` is direct.
at::Tensor cast_without_history(const at::Tensor& tensor, c10::ScalarType to, CallPath path);

/// Does so for dense float32 tensors on one device, on CUDA in one launch. Exported for
/// benchmarks.
FASTAMP_API std::vector<at::Tensor> cast_data_together(const std::vector<at::Tensor>& tensors,
                                                       c10::ScalarType to);

/// A tensor of its own, without history, over memory that holds a tensor with the sizes and strides
/// of `shape`, the dtype `dtype` and the version counter `version`. Runs no op.
///
/// The counter is shared, so that editing one tensor over the memory in place is noticed through
/// the others.
at::Tensor make_alias(c10::Storage memory, const at::Tensor& shape, c10::ScalarType dtype,
                      const c10::VariableVersion& version);

/// An alias of a whole dense tensor.
at::Tensor make_alias(const at::Tensor& tensor);

}  // namespace fastamp::autocast
