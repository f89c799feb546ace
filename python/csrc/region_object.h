#pragma once

#include "autocast/region.h"

#include <Python.h>

#include <utility>

namespace fastamp::python {

/// Native base of fastamp.autocast. All fields are zero until __init__ has run.
struct Region {
  PyObject ob_base;
  PyObject* device;      ///< str as given
  PyObject* fast_dtype;  ///< torch.dtype
  autocast::AutocastState wanted;
};

inline Region* as_region(PyObject* self) { return reinterpret_cast<Region*>(self); }

inline void replace_reference(PyObject*& slot, PyObject* value) {
  Py_INCREF(value);
  Py_XDECREF(std::exchange(slot, value));
}

/// Python functions that do what is rare; set once by the package.
struct RegionHooks {
  PyObject* checked_init = nullptr;  ///< (region, *args, **kwargs): torch's own checks and warnings
  PyObject* notify_export =
      nullptr;  ///< (region, entering): records the region if torch.export is tracing
};
extern RegionHooks g_region_hooks;

/// Tells torch.export that `region` begins or ends, if a torch-function mode is active. False with
/// a Python error set.
bool notify_export(PyObject* region, bool entering);

/// tp_init of Region, with torch.autocast's signature.
int region_init(PyObject* self, PyObject* args, PyObject* kwargs);

}  // namespace fastamp::python
