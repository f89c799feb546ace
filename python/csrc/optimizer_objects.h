// SPDX-License-Identifier: Apache-2.0
#pragma once

// An optimizer's Python objects as a step reads them: groups, parameters, gradients and state, with
// no Python object created per tensor.

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace fastamp::python {

namespace py = pybind11;

/// A string that dictionaries find by its address.
PyObject* interned(const char* text);

/// An attribute of an object.
/// @throws py::error_already_set  what the object raises.
py::object attribute(PyObject* object, PyObject* name);

/// Keeps objects alive, and with them the tensors in them, while the GIL is released. Cheaper than
/// owning the tensors: counting references under the GIL takes no atomic operation.
class KeepAlive {
 public:
  KeepAlive() = default;
  KeepAlive(const KeepAlive&) = delete;
  KeepAlive& operator=(const KeepAlive&) = delete;
  ~KeepAlive() {
    for (PyObject* object : objects_) {
      Py_DECREF(object);
    }
  }
  void hold(PyObject* object) { objects_.push_back(Py_NewRef(object)); }

 private:
  std::vector<PyObject*> objects_;
};

/// Hyperparameters of a group. Numbers may be anything with __float__.
/// @throws py::error_already_set  KeyError, or what the conversion raises.
py::object group_item(PyObject* group, PyObject* key);
double group_number(PyObject* group, PyObject* key);
/// An entry that a group may lack, which is then None.
py::object optional_item(PyObject* group, PyObject* key);
bool group_flag(PyObject* group, PyObject* key);
/// Whether an option is this string.
bool is_word(const py::object& option, const char* word);
/// The tensor in group["lr"] if it is one that a step can read on the device, else undefined.
at::Tensor group_rate_tensor(PyObject* group);

/// The strided tensor that C++ may work on: the object's own, or the local shard of a DTensor.
/// Null for every other subclass. The object owns it.
const at::Tensor* plain_tensor(PyObject* object);

/// Finds the state of parameters. State is mostly stored in the order of the parameters, so the
/// next entry is looked at first: hashing a tensor calls a Python function.
class StateOfParams {
 public:
  explicit StateOfParams(py::object state) : state_(std::move(state)) {}

  /// state[param] without creating it; null if there is none. Borrowed from the state.
  PyObject* find(PyObject* param);
  /// Passes over the entry of a parameter that is not needed.
  void skip(PyObject* param);

 private:
  py::object state_;
  Py_ssize_t position_ = 0;
};

/// Remembers what the last accepted tensor looked like, since the next one mostly looks the same.
class FusableCheck {
 public:
  /// Whether the fused steps take the tensor: dense, of a dtype and on a device that they know, and
  /// not intercepted.
  bool operator()(const at::Tensor& tensor) {
    if (tensor.key_set() == keys_ && tensor.scalar_type() == dtype_) [[likely]] {
      return true;
    }
    return look(tensor);
  }

 private:
  bool look(const at::Tensor& tensor);

  c10::DispatchKeySet keys_;
  at::ScalarType dtype_ = at::kByte;
};

}  // namespace fastamp::python
