// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

// torch's own weight cache: one for the process, behind a lock, in a static object.
//
// That object dies when the process exits, perhaps while threads still enter and leave regions; and
// it destroys casts under its lock, so code that runs at the end of a weight must not enter it
// again. Both functions do nothing while the process exits, and when called inside one another.
namespace fastamp::autocast {

/// Empties it. This may run user code.
void clear_torch_cache() noexcept;

/// Gives it a cast of `leaf` to hold and returns the cast, or an undefined tensor if it is not kept
/// there. torch drops it when the cache is cleared.
at::Tensor leave_in_torch_cache(const at::Tensor& leaf);

}  // namespace fastamp::autocast
