// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "step_adam.h"
#include "step_gather.h"
#include "step_sgd.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace fastamp::python {

void bind_optim(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<WeightCopyOptions>(module, "WeightCopies",
                                "The weight copies of one optimizer, and their dtype.")
      .def(py::init<at::ScalarType>(), py::arg("dtype"))
      .def_readonly("dtype", &WeightCopyOptions::dtype);
  module.def("sgd_step", wrap_pybind_function(sgd_step), py::arg("optimizer"), py::arg("gate"),
             "One fused step of an SGD optimizer, behind a gate or None. Returns (index of group, "
             "parameter) for what is left to torch's own step.");
  module.def("adam_step", wrap_pybind_function(adam_step), py::arg("optimizer"), py::arg("gate"),
             "The same for Adam and AdamW.");
}

}  // namespace fastamp::python
