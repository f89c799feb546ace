#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds the type `Region`, the native base of fastamp.autocast, and the functions it is set up
/// with, to the module. Returns false with a Python error set.
bool add_region_type(PyObject* module);

}  // namespace fastamp::python
