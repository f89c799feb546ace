// SPDX-License-Identifier: Apache-2.0
#include "uninterrupted_call.h"

#include "python_type.h"

#include <array>

namespace fastamp::python {
namespace {

struct UninterruptedCall {
  PyObject ob_base;
  PyObject* function;
};

UninterruptedCall* as_call(PyObject* self) { return reinterpret_cast<UninterruptedCall*>(self); }

PyObject* call_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* function = nullptr;
  if (PyArg_ParseTuple(args, "O:UninterruptedCall", &function) == 0) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    Py_INCREF(function);
    as_call(self)->function = function;
  }
  return self;
}

void call_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(as_call(self)->function);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* call_with(PyObject* self, PyObject* argument) {
  return PyObject_CallOneArg(as_call(self)->function, argument);
}

std::array<PyType_Slot, 4> g_call_slots{{
    {Py_tp_new, as_slot(call_new)},
    {Py_tp_dealloc, as_slot(call_dealloc)},
    {Py_mp_subscript, as_slot(call_with)},
    {0, nullptr},
}};

PyType_Spec g_call_spec{"fastamp._C.UninterruptedCall", sizeof(UninterruptedCall), 0,
                        Py_TPFLAGS_DEFAULT, g_call_slots.data()};

}  // namespace

bool add_uninterrupted_call_type(PyObject* module) { return add_type(module, g_call_spec); }

}  // namespace fastamp::python
