#pragma once

#include <pybind11/pybind11.h>

namespace fastamp::python {

/// Traces, and where in the Python program an op was called.
void bind_trace(pybind11::module_& module);

}  // namespace fastamp::python
