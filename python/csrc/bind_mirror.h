#pragma once

#include <Python.h>

namespace fastamp::python {

/// Adds the type `MirrorBase`, a module that looks up in another one what it does not have.
bool add_mirror_type(PyObject* module);

}  // namespace fastamp::python
