// SPDX-License-Identifier: Apache-2.0
#include "optimizer_objects.h"

#include "core/dtypes.h"
#include "core/interception.h"
#include "core/kernel_devices.h"
#include "core/tensor_kind.h"
#include "interned.h"

#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <atomic>

namespace fastamp::python {
namespace {

/// torch.distributed.tensor.DTensor, or null until it is imported: before, there are none.
PyTypeObject* dtensor_type() {
  PyObject* const keys[] = {interned<"torch.distributed.tensor">(), interned<"DTensor">()};
  // Found outside of an initializer: Python code may run meanwhile. Never released.
  static std::atomic<PyTypeObject*> known{nullptr};
  PyTypeObject* type = known.load(std::memory_order_acquire);
  if (type == nullptr) {
    PyObject* module = PyImport_GetModule(keys[0]);
    PyObject* found = module == nullptr ? nullptr : PyObject_GetAttr(module, keys[1]);
    Py_XDECREF(module);
    PyErr_Clear();  // Half imported.
    type = reinterpret_cast<PyTypeObject*>(found);
    known.store(type, std::memory_order_release);
  }
  return type;
}

[[noreturn]] void rethrow() { throw py::error_already_set(); }

}  // namespace

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr) {
    rethrow();
  }
  return py::reinterpret_steal<py::object>(value);
}

py::object group_item(PyObject* group, PyObject* key) {
  PyObject* found = nullptr;
  if (!PyDict_CheckExact(group) || PyDict_GetItemRef(group, key, &found) == 0) {
    found = PyObject_GetItem(group, key);
  }
  if (found == nullptr) {
    rethrow();
  }
  return py::reinterpret_steal<py::object>(found);
}

py::object optional_item(PyObject* group, PyObject* key) {
  PyObject* found = nullptr;
  if (!PyDict_CheckExact(group)) {
    found = PyObject_GetItem(group, key);
  } else {
    PyDict_GetItemRef(group, key, &found);
  }
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_KeyError) == 0) {
      rethrow();
    }
    PyErr_Clear();
  }
  if (found == nullptr) {
    return py::none();
  }
  return py::reinterpret_steal<py::object>(found);
}

void refuse_option(PyObject* key, const char* expected, py::handle got) {
  PyErr_Format(PyExc_TypeError, "step: expected %U of a group to be %s, got %R", key, expected,
               got.ptr());
  rethrow();
}

double group_number(PyObject* group, PyObject* key) {
  const auto item = group_item(group, key);
  const double number = PyFloat_AsDouble(item.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    if (!too_large && PyErr_ExceptionMatches(PyExc_TypeError) == 0) {
      rethrow();
    }
    PyErr_Clear();
    refuse_option(key, too_large ? "a number that a float can hold" : "a number", item);
  }
  return number;
}

std::vector<double> group_numbers(PyObject* group, PyObject* key, const char* expected) {
  const auto item = group_item(group, key);
  try {
    return item.cast<std::vector<double>>();
  } catch (const py::cast_error&) {
    refuse_option(key, expected, item);
  }
}

bool group_flag(PyObject* group, PyObject* key) {
  const int truth = PyObject_IsTrue(group_item(group, key).ptr());
  if (truth < 0) {
    rethrow();
  }
  return truth != 0;
}

bool is_word(const py::object& option, const char* word) {
  return PyUnicode_Check(option.ptr()) != 0 &&
         PyUnicode_CompareWithASCIIString(option.ptr(), word) == 0;
}

at::Tensor group_rate_tensor(PyObject* group) {
  PyObject* const key = interned<"lr">();
  const auto rate = group_item(group, key);
  if (!THPVariable_Check(rate.ptr())) {
    return {};
  }
  KeepAlive alive;
  const auto* tensor = plain_tensor(rate.ptr(), alive);
  return tensor != nullptr && has_geometry(*tensor) && tensor->numel() == 1 ? *tensor
                                                                            : at::Tensor();
}

void check_stored(py::handle optimizer, PyObject* group) {
  optimizer.attr("_fastamp_check_stored")("step", py::handle(group));
}

void refuse_stored(py::handle optimizer, PyObject* group) {
  check_stored(optimizer, group);
  throw py::type_error(
      "step: expected options of groups that optimizer._fastamp_check_stored knows");
}

StoredOptions StoredOptions::of(py::handle optimizer, PyObject* group, bool takes_codes) {
  PyObject* const keys[] = {interned<"state_dtype">(), interned<"state_rounding">(),
                            interned<"master">()};
  StoredOptions stored;
  bool known = true;
  const auto dtype = optional_item(group, keys[0]);
  if (THPDtype_Check(dtype.ptr())) {
    stored.moments = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    known = stored.moments == at::kFloat || stored.moments == at::kBFloat16;
  } else if (!dtype.is_none()) {
    stored.codes = is_word(dtype, "8bit");
    stored.moments = at::kBFloat16;  // Of what does not fit codes.
    known = stored.codes && takes_codes;
  }
  const auto rounding = optional_item(group, keys[1]);
  const bool nearest = is_word(rounding, "nearest");
  known = known && (nearest || rounding.is_none() || is_word(rounding, "stochastic"));
  stored.noisy = stored.codes || (stored.moments == at::kBFloat16 && !nearest);
  const auto master = optional_item(group, keys[2]);
  stored.remainders = is_word(master, "remainder");
  known = known && (stored.remainders || master.is_none() || is_word(master, "float32"));
  if (!known) [[unlikely]] {
    refuse_stored(optimizer, group);
  }
  return stored;
}

const at::Tensor* plain_tensor(PyObject* object, KeepAlive& alive) {
  if (THPVariable_CheckExact(object)) [[likely]] {
    return &THPVariable_Unpack(object);
  }
  PyTypeObject* dtensor = dtensor_type();
  if (dtensor == nullptr || Py_TYPE(object) != dtensor) {
    return nullptr;
  }
  PyObject* const key = interned<"_local_tensor">();
  auto local = attribute(object, key);
  if (!THPVariable_CheckExact(local.ptr())) {
    return nullptr;
  }
  const auto& tensor = THPVariable_Unpack(local.ptr());
  alive.hold(std::move(local));
  return &tensor;
}

py::object StateOfParams::find(PyObject* param) {
  constexpr int kAhead = 4;
  if (PyDict_Check(state_.ptr())) [[likely]] {
    const Locked locked(state_);
    auto next = position_;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (int i = 0; i < kAhead && PyDict_Next(state_.ptr(), &next, &key, &value) != 0; ++i) {
      if (key == param) {
        position_ = next;
        return py::reinterpret_borrow<py::object>(value);
      }
    }
    if (PyDict_GetItemRef(state_.ptr(), param, &value) < 0) {
      rethrow();
    }
    return py::reinterpret_steal<py::object>(value);
  }
  const int found = PySequence_Contains(state_.ptr(), param);
  PyObject* value = found > 0 ? PyObject_GetItem(state_.ptr(), param) : nullptr;
  if (found < 0 || (found > 0 && value == nullptr)) {
    rethrow();
  }
  return py::reinterpret_steal<py::object>(value);
}

void StateOfParams::skip(PyObject* param) {
  const Locked locked(state_);
  auto next = position_;
  PyObject* key = nullptr;
  if (PyDict_Check(state_.ptr()) && PyDict_Next(state_.ptr(), &next, &key, nullptr) != 0 &&
      key == param) {
    position_ = next;
  }
}

bool FusableCheck::look(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  // torch's own step calls interceptors, and its operators support names.
  if ((dtype != at::kFloat && !is_16_bit(dtype)) || !has_geometry(tensor) ||
      !has_kernels_or_meta(tensor.device().type()) || intercepts_ops(tensor) ||
      tensor.key_set().has_any(named_key())) {
    return false;
  }
  keys_ = tensor.key_set();
  dtype_ = dtype;
  return true;
}

}  // namespace fastamp::python
