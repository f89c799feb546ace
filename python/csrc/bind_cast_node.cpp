// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_node.h"
#include "bindings.h"

#include <torch/csrc/autograd/python_cpp_function.h>

namespace py = pybind11;

namespace fastamp::python {
namespace {

/// Our node derives from torch's, so the accessors of torch's Python type fit it. That type is
/// static and never goes away.
void name_cast_nodes() {
  const auto node = py::reinterpret_steal<py::object>(
      torch::autograd::functionToPyObject(autocast::torchs_cast_node()));
  if (!node) {
    throw py::error_already_set();
  }
  torch::autograd::registerCppFunction(autocast::cast_node_type(), Py_TYPE(node.ptr()));
}

}  // namespace

void bind_cast_node(py::module_& /*module*/) { name_cast_nodes(); }

}  // namespace fastamp::python
