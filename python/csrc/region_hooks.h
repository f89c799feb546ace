#pragma once

#include <Python.h>

namespace fastamp::python {

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

}  // namespace fastamp::python
