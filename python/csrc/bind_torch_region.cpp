#include "autocast/torch/torch_state.h"
#include "bindings.h"
#include "region_method.h"
#include "region_object.h"
#include "region_stack.h"
#include "torch_region.h"

#include <c10/core/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <array>
#include <memory>

// Regions of torch's own class, whose settings are ordinary attributes. The raw C API for the
// reason that region_type.cpp gives.
namespace fastamp::python {
namespace {

struct DropReference {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, DropReference>;

Reference attribute(PyObject* object, const char* name, PyObject*& interned) {
  if (interned == nullptr) {
    interned = PyUnicode_InternFromString(name);
  }
  return Reference(interned == nullptr ? nullptr : PyObject_GetAttr(object, interned));
}

bool read_device(PyObject* region, autocast::AutocastState& out) {
  static PyObject* interned = nullptr;
  const Reference device = attribute(region, "device", interned);
  if (device == nullptr) {
    return false;
  }
  const char* name = PyUnicode_Check(device.get()) != 0 ? PyUnicode_AsUTF8(device.get()) : nullptr;
  if (name == nullptr) {
    PyErr_Format(PyExc_TypeError, "autocast.__enter__: expected device to be a str, got %.100s",
                 Py_TYPE(device.get())->tp_name);
    return false;
  }
  out.device = c10::Device(name).type();
  return true;
}

bool read_dtype(PyObject* region, autocast::AutocastState& out) {
  static PyObject* interned = nullptr;
  const Reference dtype = attribute(region, "fast_dtype", interned);
  if (dtype == nullptr) {
    return false;
  }
  if (!THPDtype_Check(dtype.get())) {
    PyErr_Format(PyExc_TypeError,
                 "autocast.__enter__: expected dtype to be a torch.dtype, got "
                 "%.100s",
                 Py_TYPE(dtype.get())->tp_name);
    return false;
  }
  out.dtype = reinterpret_cast<THPDtype*>(dtype.get())->scalar_type;
  return true;
}

bool read_flag(PyObject* region, const char* name, PyObject*& interned, bool& out) {
  const Reference flag = attribute(region, name, interned);
  if (flag == nullptr) {
    return false;
  }
  if (PyBool_Check(flag.get()) == 0) {
    PyErr_Format(PyExc_TypeError, "autocast.__enter__: expected %s to be a bool, got %.100s",
                 name + 1, Py_TYPE(flag.get())->tp_name);  // without the underscore
    return false;
  }
  out = flag.get() == Py_True;
  return true;
}

bool read_settings(PyObject* region, autocast::AutocastState& out) {
  static PyObject* enabled = nullptr;
  static PyObject* cache_enabled = nullptr;
  return read_device(region, out) && read_dtype(region, out) &&
         read_flag(region, "_enabled", enabled, out.enabled) &&
         read_flag(region, "_cache_enabled", cache_enabled, out.cache_enabled);
}

}  // namespace

PyObject* enter_torch_region(PyObject* region) {
  HANDLE_TH_ERRORS
  autocast::AutocastState wanted{};
  if (!read_settings(region, wanted)) {
    return nullptr;
  }
  push_region(region, wanted, RegionKind::torchs);
  if (!notify_export(region, true)) {
    pop_region(region);
    return nullptr;
  }
  Py_INCREF(region);
  return region;
  END_HANDLE_TH_ERRORS
}

Leaving leave_torch_region(PyObject* region) {
  HANDLE_TH_ERRORS
  if (!pop_region(region)) {
    return Leaving::unknown;
  }
  return notify_export(region, false) ? Leaving::done : Leaving::failed;
  END_HANDLE_TH_ERRORS_RET(Leaving::failed)
}

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

std::array<PyMethodDef, 5> g_functions{{
    {"open_torch_regions", count_open_torch_regions, METH_NOARGS, nullptr},
    {"after_fork_in_child", after_fork_in_child, METH_NOARGS, nullptr},
    {"region_depth", region_depth, METH_NOARGS, nullptr},
    {"copy_new_slot", copy_new_slot, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

}  // namespace

bool add_torch_region_functions(PyObject* module) {
  return add_region_method_type(module) && PyModule_AddFunctions(module, g_functions.data()) == 0;
}

}  // namespace fastamp::python
