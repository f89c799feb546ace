// SPDX-License-Identifier: Apache-2.0
#pragma once

// Types of the raw C API, for what pybind11's classes are too slow for.

#include <Python.h>

namespace fastamp::python {

/// A function as the value of a slot of a type.
template <class Function>
void* as_slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

/// Adds a type to a module, under the last part of its name. False with a Python error set.
inline bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject* base = &PyBaseObject_Type) {
  PyObject* type = PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject*>(base));
  const bool is_added =
      type != nullptr && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) == 0;
  Py_XDECREF(type);
  return is_added;
}

}  // namespace fastamp::python
