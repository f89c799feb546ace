// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"

#include <pybind11/pybind11.h>

#include <functional>
#include <vector>

namespace fastamp::python {

using Parameters = std::vector<pybind11::object>;

/// Collects the gradients of every parameter in `optimizer.param_groups`, without creating a Python
/// object per tensor (torch.amp spends three quarters of unscale_ there: about 0.6 us per tensor).
///
/// Nothing is cached between calls: walking the lists costs less than proving that a copy of them
/// is still right would, and keeps no parameter alive.
///
/// @returns The parameters whose gradients only Python code can unscale (DTensor and other tensor
///     subclasses), normally empty.
/// @throws AssertionError for an entry that is not a tensor; ValueError for a refused fp16
///     gradient; whatever the attributes of the objects raise. Requires the GIL.
Parameters gather_gradients(pybind11::handle optimizer, scaler::GradientGroups& groups);

/// The same for an iterable of parameters; appends to `foreign`.
void gather_group(const pybind11::object& params, scaler::GradientGroups& groups,
                  Parameters& foreign);

using VisitGradient = std::function<bool(const at::Tensor& parameter, const at::Tensor& gradient)>;

/// Visits the gradients in `optimizer.param_groups` for as long as `visit` returns true. False if
/// it did not, or if there is a parameter subclass, whose gradient is a property.
bool for_each_plain(pybind11::handle optimizer, const VisitGradient& visit);

/// Whether two parameters in `optimizer.param_groups` have one gradient, or one is a subclass, of
/// which that is not known. For the rare case that a gradient came twice.
bool may_share_gradients(pybind11::handle optimizer);

}  // namespace fastamp::python
