// SPDX-License-Identifier: Apache-2.0
#include "autocast/make/gradient_wrapper.h"

#include <c10/macros/Export.h>

// <ATen/functorch/DynamicLayer.h> declares these, but includes a header that torch does not ship.
namespace at::functorch {
// NOLINTBEGIN(readability-identifier-naming): torch's names
TORCH_API at::Tensor unwrapIfDead(const at::Tensor& tensor);
TORCH_API bool isDeadTensorWrapper(const at::Tensor& tensor);
// NOLINTEND(readability-identifier-naming)
}  // namespace at::functorch

namespace fastamp::autocast {

at::Tensor without_ended_wrappers(const at::Tensor& tensor) {
  at::Tensor inside = tensor;
  while (is_gradient_wrapper(inside) && at::functorch::isDeadTensorWrapper(inside)) {
    inside = at::functorch::unwrapIfDead(inside);
  }
  return inside;
}

}  // namespace fastamp::autocast
