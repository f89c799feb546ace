#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fastamp::kernels {

/// A dense tensor in host memory as kernels see it: numbers in a row, whatever its dimensions.
struct HostArray {
  void* data;  ///< Null if there are none.
  std::int64_t numel;
  c10::ScalarType dtype;
};

/// The dtypes that gradients may have.
constexpr bool is_gradient_dtype(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kHalf || dtype == c10::kBFloat16 ||
         dtype == c10::kDouble;
}

}  // namespace fastamp::kernels
