// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace fastamp::python {

/// A list or tuple as itself, another iterable as a new list.
/// @throws TypeError  it is not iterable.
inline pybind11::object as_fast_sequence(const pybind11::object& iterable) {
  PyObject* sequence = PySequence_Fast(iterable.ptr(), "expected an iterable of parameters");
  if (sequence == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(sequence);
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

}  // namespace fastamp::python
