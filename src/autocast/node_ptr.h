// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>
#include <utility>

namespace fastamp::autocast {

/// Pointer by which this torch holds nodes: std::shared_ptr, later versions c10::intrusive_ptr.
using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

}  // namespace fastamp::autocast
