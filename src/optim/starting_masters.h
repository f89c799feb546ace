// SPDX-License-Identifier: Apache-2.0
#pragma once

// The float32 values that parameters were rounded from before any optimizer had a state for them.

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastamp::optim {

/// Keeps the float32 values of parameters until an optimizer takes them, the parameter is frozen or
/// gone, or they are replaced. An undefined master forgets them. Thread-safe.
/// @param params   The objects count, not what they hold: `.data` may be replaced meanwhile. Who
///                 makes them sees to it that forget_starting_master() is called at their end.
/// @param masters  float32, one for each parameter; kept as they are, not copied.
FASTAMP_API void set_starting_masters(at::TensorList params, at::TensorList masters);

/// The parameters for which any are kept, in no order. Thread-safe.
FASTAMP_API std::vector<at::Tensor> with_starting_masters();

/// The values kept for a parameter, on its device, where it was not written since: there they are
/// its own. Undefined if there are none, or if the parameter has another shape by now. Thread-safe.
FASTAMP_API at::Tensor starting_master_of(const at::Tensor& param);

/// The values as they were kept, for a step, which looks by itself where the parameter was written.
/// Thread-safe.
FASTAMP_API at::Tensor kept_starting_master(const at::Tensor& param);

/// Forgets those of one parameter, which may be at its end. Thread-safe.
FASTAMP_API void forget_starting_master(const c10::TensorImpl* param) noexcept;

/// Forgets those of parameters that require no gradient any more. Thread-safe.
FASTAMP_API void forget_frozen_starting_masters();

}  // namespace fastamp::optim
