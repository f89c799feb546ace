#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Adds passes over gradients and their results to the module.
void bind_passes(pybind11::module_& module);

}  // namespace fastamp::python
