// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

// torch's autocast state and cache behind a header of our own: <ATen/autocast_mode.h> costs 10 s of
// compile time per file.
namespace fastamp::autocast {

/// The lower-precision dtype in force for ops on `device` on this thread.
FASTAMP_API c10::ScalarType region_dtype(c10::DeviceType device);

/// Whether the regions of this thread may keep casts of weights.
FASTAMP_API bool is_weight_cache_enabled();

/// Whether torch's CUDA-graph trees own this tensor: its identity then outlives its contents.
bool is_cached_by_torch(const at::Tensor& tensor);

/// Number of autocast regions open on this thread, torch's own and fastamp's.
FASTAMP_API int region_depth();

/// Whether this thread is in a region or has autocast switched on for CPU or CUDA.
bool in_region();

/// Whether casts of weights require gradients although grad mode is off, as torch's do from 2.11
/// on: there they have their history, so that later ops of the region may use them. Ops look at it:
/// matmul chooses its kernel by it, and kernels may round differently. This torch is asked, once in
/// a process.
bool weights_always_require_grad();

// torch's own weight cache: one for the process, behind a lock, in a static object.
//
// That object dies when the process exits, perhaps while threads still enter and leave regions; and
// it destroys casts under its lock, so code that runs at the end of a weight must not enter it
// again. Its functions do nothing while the process exits, and when called inside one another.

/// Makes what clear_torch_cache() needs on this thread, so that it needs no memory.
void prepare_to_clear_torch_cache();
/// Empties it. This may run user code.
void clear_torch_cache() noexcept;

/// Gives it a cast of `leaf` to hold and returns the cast, or an undefined tensor if it is not kept
/// there. torch drops it when the cache is cleared.
at::Tensor leave_in_torch_cache(const at::Tensor& leaf);

}  // namespace fastamp::autocast
