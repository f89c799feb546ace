#pragma once

#include <ATen/core/Tensor.h>

namespace fastamp::autocast {

/// Whether a cast of this tensor may be made below the dispatcher: an ordinary tensor of
/// core/tensor_kind.h, no forward-mode tangent, and nobody who wants to see, wrap or transform the
/// cast (subclasses, modes, functorch, tracing, functionalization, a running profiler).
bool is_plain(const at::Tensor& tensor);

/// Whether a cast of this tensor could be made below the dispatcher if no profiler were watching.
bool is_ordinary(const at::Tensor& tensor);

/// Whether a cast of this tensor may be kept for later ops: nobody intercepts ops as such now. The
/// tensor itself may be of any kind: nested, sparse, a subclass.
bool may_be_kept(const at::Tensor& tensor);

/// Whether autograd records ops on this tensor now, in the sense of the generated autograd kernels.
bool is_recorded(const at::Tensor& tensor);

}  // namespace fastamp::autocast
