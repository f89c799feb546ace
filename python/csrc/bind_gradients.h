#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Adds lists of gradients and readbacks to the module.
void bind_gradients(pybind11::module_& module);

}  // namespace fastamp::python
