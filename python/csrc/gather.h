#pragma once

#include "scaler/gradient_groups.h"

#include <pybind11/pybind11.h>

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
/// gradient;
///     whatever the attributes of the objects raise. Requires the GIL.
Parameters gather_gradients(pybind11::handle optimizer, scaler::GradientGroups& groups);

/// The same for an iterable of parameters; appends to `foreign`.
void gather_group(const pybind11::object& params, scaler::GradientGroups& groups,
                  Parameters& foreign);

}  // namespace fastamp::python
