#include "gather.h"

#include "parameter_lists.h"

#include <torch/csrc/autograd/python_variable.h>

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

}  // namespace

void gather_group(const py::object& params, scaler::GradientGroups& groups, py::list& foreign) {
  const auto sequence = as_fast_sequence(params);
  groups.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr())));
  // The size is read each time round: Python code called below may change the list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i) {
    prefetch_gradients_after(sequence.ptr(), i);
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
