// SPDX-License-Identifier: Apache-2.0
#include "region_hooks.h"

#include "interned.h"

#include <atomic>

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

namespace {

/// asyncio's function that returns the loop of the thread, or None; null until it is imported.
PyObject* running_loop_function() {
  // No initializer: Python code runs meanwhile.
  PyObject* const name = interned_or_null<"asyncio.events">();
  static std::atomic<PyObject*> known{nullptr};  // Never released.
  PyObject* function = known.load(std::memory_order_acquire);
  if (function == nullptr) {
    PyObject* events = name == nullptr ? nullptr : PyImport_GetModule(name);
    function = events == nullptr ? nullptr : PyObject_GetAttrString(events, "_get_running_loop");
    Py_XDECREF(events);
    PyErr_Clear();  // It is being imported.
    known.store(function, std::memory_order_release);
  }
  return function;
}

}  // namespace

bool notify_event_loop() {
  // A loop runs its callbacks in contexts (contextvars), which most threads never enter; asking
  // asyncio would take a sixth of the time of a region.
  PyObject* function = PyThreadState_Get()->context == nullptr ? nullptr : running_loop_function();
  if (function == nullptr) {
    return true;
  }
  PyObject* loop = PyObject_CallNoArgs(function);
  if (loop == Py_None || loop == nullptr) {
    Py_XDECREF(loop);
    return loop != nullptr;
  }
  Py_DECREF(loop);
  PyObject* result = PyObject_CallNoArgs(g_region_hooks.in_event_loop);
  Py_XDECREF(result);
  return result != nullptr;
}

}  // namespace fastamp::python
