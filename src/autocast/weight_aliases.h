// SPDX-License-Identifier: Apache-2.0
#pragma once

// Low-precision weights: 16-bit parameters that a region would not cast, and whose gradients it has
// summed as those of the cast of a float32 weight all the same.

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <atomic>

namespace fastamp::autocast {

extern std::atomic<int> g_low_precision_weights;

/// Whether there are low-precision weights in this process, or were.
inline bool has_low_precision_weights() {
  return g_low_precision_weights.load(std::memory_order_relaxed) != 0;
}

/// Makes regions hand out aliases of these 16-bit parameters, one for each region and weight:
/// the gradients of its uses are summed in 16 bits and then cast to float32, and the gradients of
/// several regions, and of views, are summed in float32. The parameters must take float32 gradients
/// (`grad_dtype`). Thread-safe.
FASTAMP_API void mark_low_precision_weights(at::TensorList weights);

/// Whether mark_low_precision_weights() was called for this tensor. Thread-safe.
FASTAMP_API bool is_low_precision_weight(const at::Tensor& tensor);

/// Returns what an op of a region is to get in the place of an argument that has the region's
/// dtype: undefined if the argument itself.
at::Tensor alias_of_low_precision_weight(const at::Tensor& argument, c10::ScalarType lower);

}  // namespace fastamp::autocast
