#include "gather.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace fastamp::python {
namespace {

using Taken = scaler::GradientGroups::Taken;

py::object get_params(PyObject* group) {
  static PyObject* key = PyUnicode_InternFromString("params");
  PyObject* params = PyObject_GetItem(group, key);
  if (params == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(params);
}

py::object as_fast_sequence(const py::object& iterable) {
  // A list or tuple comes back as itself.
  PyObject* sequence = PySequence_Fast(iterable.ptr(), "expected an iterable of parameters");
  if (sequence == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(sequence);
}

// For subclasses of Parameter or Tensor: `grad` may be a property, so Python has to be asked.
void add_subclass(PyObject* item, scaler::GradientGroups& groups, py::list& foreign) {
  const auto parameter = py::reinterpret_borrow<py::object>(item);
  if (!THPVariable_Check(item)) {
    PyErr_Format(PyExc_AssertionError, "unscale_: expected param to be torch.Tensor, got %s",
                 Py_TYPE(item)->tp_name);
    throw py::error_already_set();
  }
  const py::object gradient = parameter.attr("grad");
  if (gradient.is_none()) {
    groups.skip();
    return;
  }
  const auto& tensor = THPVariable_Unpack(gradient.ptr());
  if (tensor.is_sparse()) {  // Replacing it must go through the property as well.
    groups.skip();
    foreign.append(parameter);
  } else if (groups.add(THPVariable_Unpack(item), tensor) == Taken::kForeign) {
    foreign.append(parameter);
  }
}

// A plain tensor's gradient, without the calls that would read its autograd data's first line too.
const at::Tensor& gradient_of(PyObject* item) {
  static const at::Tensor none;
  const auto* meta = THPVariable_Unpack(item).unsafeGetTensorImpl()->autograd_meta();
  return meta == nullptr ? none : static_cast<const torch::autograd::AutogradMeta*>(meta)->grad_;
}

// A gradient is five dependent loads away from the list: object, parameter, its autograd data,
// gradient, what that holds. With more tensors than the cache holds each would be a miss of its
// own, so each stage is asked for some items ahead of the next one's use.
constexpr Py_ssize_t kAhead = 6;

void prefetch_ahead(PyObject* sequence, Py_ssize_t i) {
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
  if (PyObject* item = item_ahead(2)) {
    if (const auto* meta = THPVariable_Unpack(item).unsafeGetTensorImpl()->autograd_meta()) {
      __builtin_prefetch(&static_cast<const torch::autograd::AutogradMeta*>(meta)->grad_);
    }
  }
  if (PyObject* item = item_ahead(1)) {
    const auto* gradient = gradient_of(item).unsafeGetTensorImpl();
    __builtin_prefetch(gradient, /*rw=*/1);  // Its count of references,
    __builtin_prefetch(gradient + 1);        // and dtype, device and keys at its end.
  }
}

}  // namespace

void gather_group(const py::object& params, scaler::GradientGroups& groups, py::list& foreign) {
  const auto sequence = as_fast_sequence(params);
  groups.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr())));
  // The size is read each time round: Python code called below may change the list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i) {
    prefetch_ahead(sequence.ptr(), i);
    PyObject* item = PySequence_Fast_GET_ITEM(sequence.ptr(), i);
    if (THPVariable_CheckExact(item)) [[likely]] {
      const at::Tensor& gradient = gradient_of(item);
      if (!gradient.defined()) {
        groups.skip();
      } else if (groups.add(THPVariable_Unpack(item), gradient) == Taken::kForeign) {
        foreign.append(py::handle(item));
      }
    } else {
      add_subclass(item, groups, foreign);
    }
  }
}

py::list gather_gradients(py::handle optimizer, scaler::GradientGroups& groups) {
  py::list foreign;
  const auto param_groups = as_fast_sequence(optimizer.attr("param_groups"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(param_groups.ptr()); ++i) {
    gather_group(get_params(PySequence_Fast_GET_ITEM(param_groups.ptr(), i)), groups, foreign);
  }
  return foreign;
}

}  // namespace fastamp::python
