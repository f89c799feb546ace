#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds what fastamp.install() needs to run torch's own region class on our native regions.
bool add_torch_region_functions(PyObject* module);

}  // namespace fastamp::python
