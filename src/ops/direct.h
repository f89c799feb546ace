// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/amp_args.h"

#include <ATen/core/Tensor.h>

namespace fastamp::ops {

/// Whether a tensor's numbers are what its storage in host memory holds, with none still to be
/// negated, computed or asked of Python.
bool is_ordinary_cpu(const at::Tensor& tensor);

/// Whether a call of one of our ops with ordinary CPU tensors would run its CPU kernel and nothing
/// else: no dispatch mode, functorch level, tracer or profiler of this thread is to see it. The
/// kernel may then be called without the dispatcher, and be handed what the caller knows of its
/// arguments besides. The caller must bump versions itself, as the op does in ADInplaceOrView, and
/// accepts that a kernel registered over fastamp's is not called.
bool nothing_watches_calls();

/// The ops' CPU kernels behind the ops' checks, for such callers.
void unscale_and_check_cpu(const kernels::UnscaleArgs& args);
void norm_and_check_cpu(const kernels::NormArgs& args);

}  // namespace fastamp::ops
