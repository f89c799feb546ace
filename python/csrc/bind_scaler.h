#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Adds the native half of the Python GradScaler to the module.
void bind_scaler(pybind11::module_& module);

}  // namespace fastamp::python
