// SPDX-License-Identifier: Apache-2.0
#include "gather.h"

#include "parameter_lists.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <unordered_map>

namespace fastamp::python {
namespace {

using Taken = scaler::GradientGroups::Taken;

// Lists, tuples and dicts themselves are read without running Python code.
bool is_plain_sequence(PyObject* params) {
  return PyList_CheckExact(params) || PyTuple_CheckExact(params);
}

py::object get_params(PyObject* group) {
  static PyObject* key = PyUnicode_InternFromString("params");
  PyObject* params = PyObject_GetItem(group, key);
  if (params == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(params);
}

// For subclasses of Parameter or Tensor: `grad` may be a property, so Python has to be asked.
void add_subclass(PyObject* item, scaler::GradientGroups& groups, Parameters& foreign) {
  groups.give_up_addresses();  // Python code is called next.
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
    foreign.push_back(parameter);
  } else if (groups.add(THPVariable_Unpack(item), tensor) == Taken::kForeign) {
    foreign.push_back(parameter);
  }
}

py::object param_groups_of(py::handle optimizer) {
  static PyObject* key = PyUnicode_InternFromString("param_groups");
  return as_fast_sequence(optimizer.attr(py::handle(key)));
}

using Block = std::array<c10::TensorImpl*, scaler::GradientGroups::kBlock>;

// The parameters from item `first` on, up to a subclass or the end of the block.
std::size_t take_plain(PyObject* sequence, Py_ssize_t first, Block& block) {
  const auto left = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence) - first);
  PyObject** const items = PySequence_Fast_ITEMS(sequence) + first;
  for (auto i = block.size(); i < std::min(2 * block.size(), left); ++i) {
    __builtin_prefetch(items[i]);  // For the next block.
  }
  std::size_t count = 0;
  for (; count < std::min(block.size(), left) && THPVariable_CheckExact(items[count]); ++count) {
    block.at(count) = THPVariable_Unpack(items[count]).unsafeGetTensorImpl();
    __builtin_prefetch(block.at(count));
  }
  return count;
}

}  // namespace

void gather_group(const py::object& params, scaler::GradientGroups& groups, Parameters& foreign) {
  if (!is_plain_sequence(params.ptr())) {
    groups.give_up_addresses();
  }
  const auto sequence = as_fast_sequence(params);
  groups.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr())));
  Block block{};
  // The size is read each time round: Python code called below may change the list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr());) {
    if (const auto count = take_plain(sequence.ptr(), i, block); count > 0) {
      const auto foreign_ones = groups.add_block({block.data(), count});
      for (std::size_t k = 0; foreign_ones != 0 && k < count; ++k) {
        if ((foreign_ones >> k & 1U) != 0) {
          foreign.push_back(py::reinterpret_borrow<py::object>(
              PySequence_Fast_GET_ITEM(sequence.ptr(), i + static_cast<Py_ssize_t>(k))));
        }
      }
      i += static_cast<Py_ssize_t>(count);
    } else {
      add_subclass(PySequence_Fast_GET_ITEM(sequence.ptr(), i++), groups, foreign);
    }
  }
}

Parameters gather_gradients(py::handle optimizer, scaler::GradientGroups& groups) {
  Parameters foreign;
  const auto param_groups = param_groups_of(optimizer);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(param_groups.ptr()); ++i) {
    if (!PyDict_CheckExact(PySequence_Fast_GET_ITEM(param_groups.ptr(), i))) {
      groups.give_up_addresses();
    }
    gather_group(get_params(PySequence_Fast_GET_ITEM(param_groups.ptr(), i)), groups, foreign);
  }
  return foreign;
}

bool for_each_plain(py::handle optimizer, const VisitGradient& visit) {
  for (const auto& group : param_groups_of(optimizer)) {
    for (const auto& item : as_fast_sequence(get_params(group.ptr()))) {
      if (!THPVariable_CheckExact(item.ptr())) {
        return false;
      }
      const auto& gradient = gradient_of(item.ptr());
      if (gradient.defined() && !visit(THPVariable_Unpack(item.ptr()), gradient)) {
        return false;
      }
    }
  }
  return true;
}

bool may_share_gradients(py::handle optimizer) {
  std::unordered_map<const void*, const void*> owners;
  return !for_each_plain(optimizer, [&](const at::Tensor& parameter, const at::Tensor& gradient) {
    const void* const owner = parameter.unsafeGetTensorImpl();
    return owners.try_emplace(gradient.unsafeGetTensorImpl(), owner).first->second == owner;
  });
}

}  // namespace fastamp::python
