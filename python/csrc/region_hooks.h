// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>

#include <Python.h>

namespace fastamp::python {

/// Python functions that do what is rare; set once by the package.
struct RegionHooks {
  PyObject* checked_init = nullptr;  ///< (region, *args, **kwargs): torch's own checks and warnings
  PyObject* notify_export =
      nullptr;  ///< (region, entering): records the region if torch.export is tracing
  PyObject* float8_arguments = nullptr;  ///< (*args, **kwargs): (args, number of the recipe)
  PyObject* float8_changed = nullptr;    ///< (entering): a region with a recipe begins or ends
  PyObject* in_event_loop = nullptr;     ///< (): a region begins in a task of asyncio
};
extern RegionHooks g_region_hooks;

/// Calls the hook. False with a Python error set.
bool call_notify_export(PyObject* region, bool entering);

/// Notifies the package that a region with an fp8 recipe begins or has ended. False with a Python
/// error set.
bool notify_float8(bool entering);

/// Notifies the package that a region is about to begin, if an event loop of asyncio runs on this
/// thread. False with a Python error set.
bool notify_event_loop();

/// Notifies torch.export that `region` begins or ends if a torch-function mode is open. False with
/// a Python error set. Inline, since each region asks twice and the answer is nearly always no.
inline bool notify_export(PyObject* region, bool entering) {
  return !at::impl::torch_function_mode_enabled() || call_notify_export(region, entering);
}

}  // namespace fastamp::python
