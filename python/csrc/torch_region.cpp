// SPDX-License-Identifier: Apache-2.0
#include "torch_region.h"

#include "autocast/float8_interface.h"
#include "interned.h"
#include "region_hooks.h"
#include "region_object.h"
#include "region_stack.h"

#include <c10/core/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <memory>

// Regions of torch's own class, whose settings are ordinary attributes. The raw C API for the
// reason that region_type.cpp gives.
namespace fastamp::python {
namespace {

struct DropReference {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, DropReference>;

/// @param name  Of interned_or_null().
Reference setting(PyObject* object, PyObject* name) {
  return Reference(name == nullptr ? nullptr : PyObject_GetAttr(object, name));
}

bool read_device(PyObject* region, autocast::AutocastState& out) {
  PyObject* const key = interned_or_null<"device">();
  const Reference device = setting(region, key);
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
  PyObject* const key = interned_or_null<"fast_dtype">();
  const Reference dtype = setting(region, key);
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

bool read_flag(PyObject* region, PyObject* name, const char* argument, bool& out) {
  const Reference flag = setting(region, name);
  if (flag == nullptr) {
    return false;
  }
  if (PyBool_Check(flag.get()) == 0) {
    PyErr_Format(PyExc_TypeError, "autocast.__enter__: expected %s to be a bool, got %.100s",
                 argument, Py_TYPE(flag.get())->tp_name);
    return false;
  }
  out = flag.get() == Py_True;
  return true;
}

bool read_settings(PyObject* region, autocast::AutocastState& out) {
  PyObject* const enabled = interned_or_null<"_enabled">();
  PyObject* const cache_enabled = interned_or_null<"_cache_enabled">();
  return read_device(region, out) && read_dtype(region, out) &&
         read_flag(region, enabled, "enabled", out.enabled) &&
         read_flag(region, cache_enabled, "cache_enabled", out.cache_enabled);
}

/// torch's class lets any dtype pass on CUDA. An fp8 format stands for a recipe, as in our class.
void read_float8(autocast::AutocastState& wanted) {
  if (wanted.enabled && wanted.device == c10::kCUDA && c10::isFloat8Type(wanted.dtype)) {
    autocast::check_float8_dtype("autocast.__enter__", wanted.dtype);
    wanted.dtype = c10::kBFloat16;
    wanted.sets_float8 = true;
    wanted.float8 = autocast::float8_of_region("autocast.__enter__", wanted.device, Float8Recipe(),
                                               wanted.dtype);
  }
}

}  // namespace

PyObject* enter_torch_region(PyObject* region) {
  HANDLE_TH_ERRORS
  autocast::AutocastState wanted{};
  if (!read_settings(region, wanted)) {
    return nullptr;
  }
  read_float8(wanted);
  if (!notify_event_loop() || (wanted.float8 != nullptr && !notify_float8(true))) {
    return nullptr;
  }
  push_region(region, wanted, RegionKind::kTorch);
  if (!notify_export(region, true)) {
    if (pop_region(region).had_float8) {
      notify_float8(false);
    }
    return nullptr;
  }
  Py_INCREF(region);
  return region;
  END_HANDLE_TH_ERRORS
}

Leaving leave_torch_region(PyObject* region) {
  HANDLE_TH_ERRORS
  const auto ended = pop_region(region);
  if (!ended.found) {
    return Leaving::kUnknown;
  }
  const bool is_notified = !ended.had_float8 || notify_float8(false);
  return is_notified && notify_export(region, false) ? Leaving::kDone : Leaving::kFailed;
  END_HANDLE_TH_ERRORS_RET(Leaving::kFailed)
}

}  // namespace fastamp::python
