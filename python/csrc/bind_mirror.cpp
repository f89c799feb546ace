// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "interned.h"
#include "python_type.h"

#include <torch/csrc/utils/pythoncapi_compat.h>

#include <array>

// In C, because fastamp.torch is on the path of every op a program calls: through a Python
// __getattr__ each `torch.x` costs 50 times as much as through a module, this way about twice.
namespace fastamp::python {
namespace {

/// New reference, or nullptr; with an error set if the name has no hash.
PyObject* find(PyObject* module, PyObject* name) {
  PyObject* value = nullptr;
  PyDict_GetItemRef(PyModule_GetDict(module), name, &value);
  return value;
}

/// New reference to the module that is mirrored, or nullptr before the mirror is set up.
PyObject* mirrored_by(PyObject* mirror) {
  PyObject* const name = interned_or_null<"__mirrored__">();
  PyObject* mirrored = find(mirror, name);
  if (mirrored != nullptr && PyModule_Check(mirrored) == 0) {
    Py_CLEAR(mirrored);
  }
  return mirrored;
}

PyObject* look_up(PyObject* self, PyObject* mirrored, PyObject* name) {
  PyObject* value = find(mirrored, name);
  if (value != nullptr || PyErr_Occurred() != nullptr) {
    return value;
  }
  // What modules have from their type, such as __dict__ and __class__.
  value = PyObject_GenericGetAttr(self, name);
  if (value != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError) == 0) {
    return value;
  }
  PyErr_Clear();
  return PyObject_GetAttr(mirrored, name);  // its own __getattr__, its own error
}

PyObject* mirror_getattro(PyObject* self, PyObject* name) {
  PyObject* value = find(self, name);
  if (value != nullptr || PyErr_Occurred() != nullptr) {
    return value;
  }
  PyObject* mirrored = mirrored_by(self);
  if (mirrored == nullptr) {
    return PyObject_GenericGetAttr(self, name);
  }
  value = look_up(self, mirrored, name);
  Py_DECREF(mirrored);
  return value;
}

std::array<PyType_Slot, 2> g_mirror_slots{{
    {Py_tp_getattro, as_slot(mirror_getattro)},
    {0, nullptr},
}};

PyType_Spec g_mirror_spec{"fastamp._C.MirrorBase", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                          g_mirror_slots.data()};

}  // namespace

bool add_mirror_type(PyObject* module) { return add_type(module, g_mirror_spec, &PyModule_Type); }

}  // namespace fastamp::python
