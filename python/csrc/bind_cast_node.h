#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Gives the autograd nodes of our casts the Python type that torch's have, at once.
void bind_cast_node(pybind11::module_& module);

}  // namespace fastamp::python
