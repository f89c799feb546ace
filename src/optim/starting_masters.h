// SPDX-License-Identifier: Apache-2.0
#pragma once

// The float32 values that parameters were rounded from before any optimizer had a state for them.

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>

namespace fastamp::optim {

/// Keeps the float32 values of parameters until an optimizer takes them, the parameter is gone, or
/// they are replaced. An undefined master forgets them. Thread-safe.
/// @param params   The objects count, not what they hold: `.data` may be replaced meanwhile.
/// @param masters  float32, one for each parameter; kept as they are, not copied.
FASTAMP_API void set_starting_masters(at::TensorList params, at::TensorList masters);

/// The values kept for a parameter, on its device; undefined if there are none, or if the
/// parameter has another shape by now. Thread-safe.
FASTAMP_API at::Tensor starting_master_of(const at::Tensor& param);

/// The same, and forgets them.
FASTAMP_API at::Tensor take_starting_master(const at::Tensor& param);

}  // namespace fastamp::optim
