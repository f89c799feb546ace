#include "bind_cast_node.h"

#include "autocast/cast_node.h"

#include <torch/csrc/autograd/python_cpp_function.h>

namespace py = pybind11;

namespace fastamp::python {
namespace {

/// Our node derives from the one whose type this is, so the accessors of the type fit it.
void name_cast_nodes(const py::type& type_of_torchs_node) {
  torch::autograd::registerCppFunction(autocast::cast_node_type(),
                                       reinterpret_cast<PyTypeObject*>(type_of_torchs_node.ptr()));
}

}  // namespace

void bind_cast_node(py::module_& module) { module.def("name_cast_nodes", name_cast_nodes); }

}  // namespace fastamp::python
