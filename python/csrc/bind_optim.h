#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Adds the steps of the optimizers.
void bind_optim(pybind11::module_& module);

}  // namespace fastamp::python
