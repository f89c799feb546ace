// SPDX-License-Identifier: Apache-2.0
#include "region_hooks.h"

namespace fastamp::python {

RegionHooks g_region_hooks;

bool call_notify_export(PyObject* region, bool entering) {
  PyObject* result = PyObject_CallFunctionObjArgs(g_region_hooks.notify_export, region,
                                                  entering ? Py_True : Py_False, nullptr);
  Py_XDECREF(result);
  return result != nullptr;
}

bool notify_float8(bool entering) {
  PyObject* result = PyObject_CallFunctionObjArgs(g_region_hooks.float8_changed,
                                                  entering ? Py_True : Py_False, nullptr);
  Py_XDECREF(result);
  return result != nullptr;
}

}  // namespace fastamp::python
