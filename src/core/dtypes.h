// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace fastamp {

/// The dtypes that autocast lowers to, and that weights with a master have.
constexpr bool is_16_bit(c10::ScalarType dtype) {
  return dtype == c10::kHalf || dtype == c10::kBFloat16;
}
inline bool is_16_bit(const at::Tensor& tensor) { return is_16_bit(tensor.scalar_type()); }

}  // namespace fastamp
