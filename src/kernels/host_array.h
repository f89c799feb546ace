// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>

namespace fastamp::kernels {

/// A dense tensor in host memory as kernels see it: numbers in a row, whatever its dimensions.
struct HostArray {
  void* data;  ///< Null if there are none.
  std::int64_t numel;
  c10::ScalarType dtype;
};

/// Facts that a caller of a CPU kernel may know of its `grads`: each is a dense array of a good
/// dtype in host memory, at this address, and has not changed since. Empty: nothing is known.
using KnownArrays = c10::ArrayRef<HostArray>;

/// Prefetches the numbers of an array some places after the i-th: with thousands of small arrays,
/// cache misses would take most of the time.
inline void prefetch_after(KnownArrays arrays, std::size_t i) {
  constexpr std::size_t kAhead = 8;
  if (i + kAhead < arrays.size()) {
    __builtin_prefetch(arrays[i + kAhead].data, /*rw=*/1);
  }
}

/// The dtypes that gradients may have.
constexpr bool is_gradient_dtype(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kHalf || dtype == c10::kBFloat16 ||
         dtype == c10::kDouble;
}

}  // namespace fastamp::kernels
