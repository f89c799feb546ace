// SPDX-License-Identifier: Apache-2.0
#include "autocast/region.h"
#include "autocast/torch_state.h"
#include "bindings.h"
#include "region_hooks.h"
#include "region_method.h"
#include "region_stack.h"
#include "uninterrupted_call.h"

#include <Python.h>

#include <array>
#include <cstddef>

namespace fastamp::python {
namespace {

PyObject* count_open_torch_regions(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyLong_FromLongLong(open_torch_regions());
}

PyObject* after_fork_in_child(PyObject* /*module*/, PyObject* /*unused*/) {
  forget_regions_of_other_threads();
  Py_RETURN_NONE;
}

PyObject* region_depth(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyLong_FromLong(autocast::region_depth());
}

PyObject* open_regions(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyLong_FromSize_t(autocast::open_regions());
}

/// (depth): ends the regions of this thread above the first `depth`, as far as they are Python's.
PyObject* leave_regions_above(PyObject* /*module*/, PyObject* depth) {
  const std::size_t kept = PyLong_AsSize_t(depth);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  bool is_notified = true;
  while (void* const owner = autocast::owner_above(kept)) {
    if (pop_region(static_cast<PyObject*>(owner)).had_float8) {
      is_notified = notify_float8(false) && is_notified;
    }
  }
  if (!is_notified) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

/// (cls, source): gives `cls` the constructor slot of `source`.
///
/// Finishes `del cls.__new__`: CPython leaves the slot at a function that looks `__new__` up, and
/// then object.__new__ refuses the arguments of __init__.
PyObject* copy_new_slot(PyObject* /*module*/, PyObject* args) {
  PyObject* cls = nullptr;
  PyObject* source = nullptr;
  if (PyArg_ParseTuple(args, "O!O!", &PyType_Type, &cls, &PyType_Type, &source) == 0) {
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(cls);
  type->tp_new = reinterpret_cast<PyTypeObject*>(source)->tp_new;
  PyType_Modified(type);
  Py_RETURN_NONE;
}

std::array<PyMethodDef, 7> g_torch_region_functions{{
    {"open_regions", open_regions, METH_NOARGS, nullptr},
    {"leave_regions_above", leave_regions_above, METH_O, nullptr},
    {"open_torch_regions", count_open_torch_regions, METH_NOARGS, nullptr},
    {"after_fork_in_child", after_fork_in_child, METH_NOARGS, nullptr},
    {"region_depth", region_depth, METH_NOARGS, nullptr},
    {"copy_new_slot", copy_new_slot, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

}  // namespace

bool add_torch_region_functions(PyObject* module) {
  return add_region_method_type(module) && add_uninterrupted_call_type(module) &&
         PyModule_AddFunctions(module, g_torch_region_functions.data()) == 0;
}

}  // namespace fastamp::python
