#pragma once

#include <ATen/core/Tensor.h>

namespace fastamp::autocast {

/// Whether a cast of this tensor may be made below the dispatcher: an ordinary dense tensor, no
/// forward-mode tangent, and nobody who wants to see, wrap or transform the cast (subclasses,
/// modes, functorch, tracing, functionalization, a running profiler).
bool is_plain(const at::Tensor& tensor);

/// Whether autograd records ops on this tensor now, in the sense of the generated autograd kernels.
bool is_recorded(const at::Tensor& tensor);

}  // namespace fastamp::autocast
