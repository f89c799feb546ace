// SPDX-License-Identifier: Apache-2.0
#pragma once

// An optimizer's Python objects as a step reads them: groups, parameters, gradients and state, with
// no Python object created per tensor.

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace fastamp::python {

namespace py = pybind11;

/// An attribute of an object.
/// @throws py::error_already_set  what the object raises.
py::object attribute(PyObject* object, PyObject* name);

/// Locks an object that is read without calls of Python, in a Python without a GIL; in others it
/// costs nothing. Let go of when the GIL would be: what Python code may change is to be read anew.
using Locked = py::scoped_critical_section;

/// A list or tuple as itself, another iterable as a new list.
/// @throws TypeError  it is not iterable.
inline py::object as_fast_sequence(const py::object& iterable) {
  PyObject* sequence = PySequence_Fast(iterable.ptr(), "expected an iterable of parameters");
  if (sequence == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(sequence);
}

/// The gradient of a plain tensor, without the calls that would read its autograd data's first line
/// too; undefined where there is none.
inline const at::Tensor& gradient_of(PyObject* plain) {
  static const at::Tensor none;
  const auto* meta = THPVariable_Unpack(plain).unsafeGetTensorImpl()->autograd_meta();
  return meta == nullptr ? none : static_cast<const torch::autograd::AutogradMeta*>(meta)->grad_;
}

/// Prefetches for a loop over a fast sequence of parameters that reads the gradient of item i.
///
/// A gradient is five dependent loads away from the list: object, parameter, its autograd data,
/// gradient, what that holds. With more tensors than the cache holds, each load would be a miss, so
/// each stage is prefetched some items before the next stage uses it.
/// @param gradients  False: only the parameters will be read, which are two loads away.
inline void prefetch_gradients_after(PyObject* sequence, Py_ssize_t i, bool gradients) {
  constexpr Py_ssize_t kAhead = 6;
  const auto size = PySequence_Fast_GET_SIZE(sequence);
  const auto item_ahead = [&](Py_ssize_t stages) -> PyObject* {
    const auto at = i + stages * kAhead;
    PyObject* item = at < size ? PySequence_Fast_GET_ITEM(sequence, at) : nullptr;
    return item != nullptr && THPVariable_CheckExact(item) ? item : nullptr;
  };
  if (i + 4 * kAhead < size) {
    __builtin_prefetch(PySequence_Fast_GET_ITEM(sequence, i + 4 * kAhead));
  }
  if (PyObject* item = item_ahead(3)) {
    __builtin_prefetch(THPVariable_Unpack(item).unsafeGetTensorImpl());
  }
  if (!gradients) {
    return;
  }
  if (PyObject* item = item_ahead(2)) {
    if (const auto* meta = THPVariable_Unpack(item).unsafeGetTensorImpl()->autograd_meta()) {
      __builtin_prefetch(&static_cast<const torch::autograd::AutogradMeta*>(meta)->grad_);
    }
  }
  if (PyObject* item = item_ahead(1)) {
    const void* gradient = gradient_of(item).unsafeGetTensorImpl();
    __builtin_prefetch(gradient, /*rw=*/1);  // Its count of references,
    // and dtype, device and keys at its end.
    __builtin_prefetch(static_cast<const char*>(gradient) + sizeof(c10::TensorImpl));
  }
}

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
  void hold(py::object object) {
    objects_.push_back(object.ptr());
    object.release();
  }
  void hold(PyObject* object) { hold(py::reinterpret_borrow<py::object>(object)); }

 private:
  std::vector<PyObject*> objects_;
};

/// Hyperparameters of a group. Numbers may be anything with __float__.
/// @throws py::error_already_set  KeyError, or what the conversion raises.
py::object group_item(PyObject* group, PyObject* key);
double group_number(PyObject* group, PyObject* key);
/// @param expected  What the option is to be, for the error of one that is no sequence of numbers.
std::vector<double> group_numbers(PyObject* group, PyObject* key, const char* expected);
/// Raises a TypeError that names the option.
[[noreturn]] void refuse_option(PyObject* key, const char* expected, py::handle got);
/// An entry that a group may lack, which is then None.
py::object optional_item(PyObject* group, PyObject* key);
bool group_flag(PyObject* group, PyObject* key);
/// Whether an option is this string.
bool is_word(const py::object& option, const char* word);
/// The tensor in group["lr"] if it is one that a step can read on the device, else undefined.
at::Tensor group_rate_tensor(PyObject* group);

/// Reads what the options of a group that torch's groups do not have say of its parameters' state.
struct StoredOptions {
  at::ScalarType moments = at::kFloat;  ///< Dtype of moments that are no codes.
  bool codes = false;                   ///< Moments are codes of 8 bits where they fit.
  bool noisy = false;                   ///< Narrow moments are rounded stochastically.
  bool remainders = false;              ///< Masters are kept as remainders.

  /// The one place where a step learns how state is stored; the state itself does not decide.
  /// @throws py::error_already_set  What check_stored() raises.
  /// @param takes_codes  Whether moments of this kind of optimizer may be codes.
  static StoredOptions of(py::handle optimizer, PyObject* group, bool takes_codes);
};

/// Raises what `optimizer._fastamp_check_stored` raises for a group with a value that there is not.
void check_stored(py::handle optimizer, PyObject* group);
/// Throws for a group with a value that C++ does not know.
[[noreturn]] void refuse_stored(py::handle optimizer, PyObject* group);

/// The strided tensor that C++ may work on: the object's own, which the object owns, or the local
/// shard of a DTensor, which may get another one: `alive` holds it. Null for every other subclass.
const at::Tensor* plain_tensor(PyObject* object, KeepAlive& alive);

/// Finds the state of parameters. State is mostly stored in the order of the parameters, so the
/// next entry is looked at first: hashing a tensor calls a Python function.
class StateOfParams {
 public:
  explicit StateOfParams(py::object state) : state_(std::move(state)) {}

  /// state[param] without creating it; null if there is none.
  py::object find(PyObject* param);
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
