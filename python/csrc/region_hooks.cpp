#include "region_hooks.h"

#include <ATen/PythonTorchFunctionTLS.h>

namespace fastamp::python {

RegionHooks g_region_hooks;

bool notify_export(PyObject* region, bool entering) {
  if (!at::impl::torch_function_mode_enabled()) {
    return true;
  }
  PyObject* result = PyObject_CallFunctionObjArgs(g_region_hooks.notify_export, region,
                                                  entering ? Py_True : Py_False, nullptr);
  Py_XDECREF(result);
  return result != nullptr;
}

}  // namespace fastamp::python
