// SPDX-License-Identifier: Apache-2.0
#include "region_method.h"

#include "autocast/torch_state.h"
#include "python_type.h"
#include "region_object.h"
#include "torch_region.h"

#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>

namespace fastamp::python {
namespace {

struct RegionMethod {
  PyObject ob_base;
  vectorcallfunc call;
  PyObject* torchs;  ///< The function that this replaces.
};

RegionMethod* as_method(PyObject* self) { return reinterpret_cast<RegionMethod*>(self); }

/// Hands on calls that are not fastamp's to handle, wrong ones included: torch's function raises
/// then.
PyObject* call_torchs(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* names) {
  // The caller lends the slot before the arguments to this function, which lends it on.
  return PyObject_Vectorcall(as_method(self)->torchs, args, nargsf, names);
}

PyObject* call_enter(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* names) {
  const bool is_ordinary = PyVectorcall_NARGS(nargsf) == 1 && names == nullptr;
  return is_ordinary ? enter_torch_region(args[0]) : call_torchs(self, args, nargsf, names);
}

/// Whether the arguments are (region, exc_type, exc_val, exc_tb), the last three maybe by name.
bool are_of_exit(std::size_t nargsf, PyObject* names) {
  constexpr std::array<const char*, 4> kNames{"self", "exc_type", "exc_val", "exc_tb"};
  const auto nargs = PyVectorcall_NARGS(nargsf);
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (nargs < 1 || nargs + named != static_cast<Py_ssize_t>(kNames.size())) {
    return false;
  }
  return std::all_of(std::next(kNames.begin(), nargs), kNames.end(), [&](const char* wanted) {
    for (Py_ssize_t i = 0; i < named; ++i) {
      if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), wanted) == 0) {
        return true;
      }
    }
    return false;
  });
}

/// Whether torch's own __enter__ has entered the region, before install(): each of its entries
/// leaves a state on the object.
bool was_entered_by_torch(PyObject* region) {
  return autocast::region_depth() > 0 && PyObject_HasAttrString(region, "prev") != 0;
}

PyObject* call_exit(PyObject* self, PyObject* const* args, std::size_t nargsf, PyObject* names) {
  if (!are_of_exit(nargsf, names)) {
    return call_torchs(self, args, nargsf, names);
  }
  switch (leave_torch_region(args[0])) {
    case Leaving::kDone:
      Py_RETURN_FALSE;
    case Leaving::kFailed:
      return nullptr;
    case Leaving::kUnknown:
      break;
  }
  if (was_entered_by_torch(args[0])) {
    return call_torchs(self, args, nargsf, names);
  }
  PyErr_SetString(PyExc_RuntimeError,
                  "autocast.__exit__: expected a region that was entered on this thread and not "
                  "left yet, got one that was not");
  return nullptr;
}

PyObject* method_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* function = nullptr;
  int entering = 0;
  if (PyArg_ParseTuple(args, "Op:RegionMethod", &function, &entering) == 0) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    as_method(self)->call = entering != 0 ? call_enter : call_exit;
    replace_reference(as_method(self)->torchs, function);
  }
  return self;
}

void method_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(as_method(self)->torchs);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* method_bind(PyObject* self, PyObject* region, PyObject* /*type*/) {
  if (region == nullptr || region == Py_None) {
    Py_INCREF(self);
    return self;
  }
  return PyMethod_New(self, region);
}

/// Pickled by name, as functions are.
PyObject* method_reduce(PyObject* self, PyObject* /*unused*/) {
  return PyObject_GetAttrString(as_method(self)->torchs, "__qualname__");
}

PyObject* get_torchs(PyObject* self, void* name) {
  return PyObject_GetAttrString(as_method(self)->torchs, static_cast<const char*>(name));
}

char g_module[] = "__module__";
char g_name[] = "__name__";
char g_qualname[] = "__qualname__";
char g_doc[] = "__doc__";

std::array<PyGetSetDef, 5> g_method_attributes{{
    {g_module, get_torchs, nullptr, nullptr, g_module},
    {g_name, get_torchs, nullptr, nullptr, g_name},
    {g_qualname, get_torchs, nullptr, nullptr, g_qualname},
    {g_doc, get_torchs, nullptr, nullptr, g_doc},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
}};

// inspect follows __wrapped__ to the signature and the source.
std::array<PyMemberDef, 3> g_members{{
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(RegionMethod, call), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(RegionMethod, torchs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
}};

std::array<PyMethodDef, 2> g_method_methods{{
    {"__reduce__", method_reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

std::array<PyType_Slot, 8> g_method_slots{{
    {Py_tp_new, as_slot(method_new)},
    {Py_tp_dealloc, as_slot(method_dealloc)},
    {Py_tp_call, as_slot(PyVectorcall_Call)},
    {Py_tp_descr_get, as_slot(method_bind)},
    {Py_tp_getset, g_method_attributes.data()},
    {Py_tp_members, g_members.data()},
    {Py_tp_methods, g_method_methods.data()},
    {0, nullptr},
}};

PyType_Spec g_method_spec{
    "fastamp._C.RegionMethod", sizeof(RegionMethod), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    g_method_slots.data()};

}  // namespace

bool add_region_method_type(PyObject* module) { return add_type(module, g_method_spec); }

}  // namespace fastamp::python
