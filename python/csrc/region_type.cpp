// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "float8/recipe.h"
#include "python_type.h"
#include "region_hooks.h"
#include "region_init.h"
#include "region_object.h"
#include "region_stack.h"

#include <c10/core/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <array>

// The raw C API, and only here: entering a region through a pybind11 class costs three times as
// much.
namespace fastamp::python {

namespace {

// -- attributes, named as torch.autocast names them

int set_device(PyObject* self, PyObject* value, void* /*closure*/) {
  HANDLE_TH_ERRORS
  const char* name = value == nullptr ? nullptr : PyUnicode_AsUTF8(value);
  if (name == nullptr) {
    PyErr_SetString(PyExc_TypeError,
                    "autocast.device: expected a str such as 'cuda', got another type");
    return -1;
  }
  as_region(self)->wanted.device = c10::Device(name).type();
  replace_reference(as_region(self)->device, value);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

int set_fast_dtype(PyObject* self, PyObject* value, void* /*closure*/) {
  if (value == nullptr || !THPDtype_Check(value)) {
    PyErr_Format(PyExc_TypeError, "autocast: expected dtype to be a torch.dtype, got %.100s",
                 value == nullptr ? "nothing" : Py_TYPE(value)->tp_name);
    return -1;
  }
  as_region(self)->wanted.dtype = reinterpret_cast<THPDtype*>(value)->scalar_type;
  replace_reference(as_region(self)->fast_dtype, value);
  return 0;
}

template <bool autocast::AutocastState::* kField>
int set_flag(PyObject* self, PyObject* value, void* name) {
  if (value == nullptr || PyBool_Check(value) == 0) {
    PyErr_Format(PyExc_TypeError, "autocast: expected %s to be a bool, got %.100s",
                 static_cast<const char*>(name),
                 value == nullptr ? "nothing" : Py_TYPE(value)->tp_name);
    return -1;
  }
  as_region(self)->wanted.*kField = value == Py_True;
  return 0;
}

int set_float8_number(PyObject* self, PyObject* value, void* /*closure*/) {
  HANDLE_TH_ERRORS
  auto& wanted = as_region(self)->wanted;
  if (value == nullptr || value == Py_None) {
    wanted.sets_float8 = false;
    wanted.float8 = nullptr;
    return 0;
  }
  const auto number = PyLong_AsUnsignedLong(value);
  if (PyErr_Occurred() != nullptr) {
    return -1;
  }
  wanted.float8 = autocast::float8_setting_numbered(static_cast<std::uint32_t>(number));
  wanted.sets_float8 = true;
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyObject* get_float8_number(PyObject* self, void* /*closure*/) {
  const auto& wanted = as_region(self)->wanted;
  if (!wanted.sets_float8) {
    Py_RETURN_NONE;
  }
  const bool has_recipe =
      wanted.float8 != nullptr && wanted.float8 != autocast::no_float8(wanted.device);
  return PyLong_FromUnsignedLong(has_recipe ? wanted.float8->number : 0);
}

template <PyObject* Region::* kField>
PyObject* get_object(PyObject* self, void* /*closure*/) {
  PyObject* value = as_region(self)->*kField;
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "autocast: __init__ has not been called");
    return nullptr;
  }
  Py_INCREF(value);
  return value;
}

template <bool autocast::AutocastState::* kField>
PyObject* get_flag(PyObject* self, void* /*closure*/) {
  return PyBool_FromLong(static_cast<long>(as_region(self)->wanted.*kField));
}

void region_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(as_region(self)->device);
  Py_CLEAR(as_region(self)->fast_dtype);
  type->tp_free(self);
  Py_DECREF(type);
}

// -- the region

PyObject* region_enter(PyObject* self, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  if (as_region(self)->fast_dtype == nullptr) {
    PyErr_SetString(PyExc_RuntimeError,
                    "autocast.__enter__: expected an initialised region, got one whose "
                    "__init__ was not called");
    return nullptr;
  }
  const auto& wanted = as_region(self)->wanted;
  const bool has_float8 = wanted.sets_float8 && wanted.float8 != nullptr;
  if (!notify_event_loop() || (has_float8 && !notify_float8(true))) {
    return nullptr;
  }
  push_region(self, wanted);
  if (!notify_export(self, true)) {
    if (pop_region(self).had_float8) {
      notify_float8(false);
    }
    return nullptr;
  }
  Py_INCREF(self);
  return self;
  END_HANDLE_TH_ERRORS
}

PyObject* region_exit(PyObject* self, PyObject* const* /*args*/, Py_ssize_t /*nargs*/) {
  HANDLE_TH_ERRORS
  const auto ended = pop_region(self);
  if (!ended.found) {
    PyErr_SetString(PyExc_RuntimeError,
                    "autocast.__exit__: expected a region that was entered on this thread "
                    "and not left yet, got one that was not");
    return nullptr;
  }
  if ((ended.had_float8 && !notify_float8(false)) || !notify_export(self, false)) {
    return nullptr;
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

PyObject* set_hooks(PyObject* /*module*/, PyObject* args) {
  RegionHooks hooks;
  if (PyArg_ParseTuple(args, "OOOOO", &hooks.checked_init, &hooks.notify_export,
                       &hooks.float8_arguments, &hooks.float8_changed, &hooks.in_event_loop) == 0) {
    return nullptr;
  }
  replace_reference(g_region_hooks.checked_init, hooks.checked_init);
  replace_reference(g_region_hooks.notify_export, hooks.notify_export);
  replace_reference(g_region_hooks.float8_arguments, hooks.float8_arguments);
  replace_reference(g_region_hooks.float8_changed, hooks.float8_changed);
  replace_reference(g_region_hooks.in_event_loop, hooks.in_event_loop);
  Py_RETURN_NONE;
}

// -- the type

using autocast::AutocastState;

char g_enabled[] = "enabled";
char g_cache_enabled[] = "cache_enabled";

std::array<PyGetSetDef, 6> g_region_attributes{{
    {"device", get_object<&Region::device>, set_device, "Device type, as given.", nullptr},
    {"fast_dtype", get_object<&Region::fast_dtype>, set_fast_dtype, "Lower-precision dtype.",
     nullptr},
    {"_enabled", get_flag<&AutocastState::enabled>, set_flag<&AutocastState::enabled>, nullptr,
     g_enabled},
    {"_cache_enabled", get_flag<&AutocastState::cache_enabled>,
     set_flag<&AutocastState::cache_enabled>, nullptr, g_cache_enabled},
    {"float8_number", get_float8_number, set_float8_number,
     "The recipe, 0 for none; None leaves that in force.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
}};

// METH_FASTCALL functions have another type than the field; CPython's own modules cast them the
// same way.
std::array<PyMethodDef, 3> g_region_methods{{
    {"__enter__", region_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(region_exit)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

std::array<PyMethodDef, 2> g_region_functions{{
    {"set_region_hooks", set_hooks, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

std::array<PyType_Slot, 5> g_region_slots{{
    {Py_tp_init, as_slot(region_init)},
    {Py_tp_dealloc, as_slot(region_dealloc)},
    {Py_tp_getset, g_region_attributes.data()},
    {Py_tp_methods, g_region_methods.data()},
    {0, nullptr},
}};

PyType_Spec g_region_spec{"fastamp._C.Region", sizeof(Region), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, g_region_slots.data()};

}  // namespace

bool add_region_type(PyObject* module) {
  return add_type(module, g_region_spec) &&
         PyModule_AddFunctions(module, g_region_functions.data()) == 0;
}

}  // namespace fastamp::python
