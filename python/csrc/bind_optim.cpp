// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "optim/starting_masters.h"
#include "step_adam.h"
#include "step_gather.h"
#include "step_muon.h"
#include "step_sgd.h"

#include <fastamp/optim/stored_state.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

namespace fastamp::python {

namespace {

/// A tensor that may be undefined, as Python has it.
template <at::Tensor (*function)(const at::Tensor&)>
std::optional<at::Tensor> optional_of(const at::Tensor& param) {
  const auto found = function(param);
  return found.defined() ? std::optional(found) : std::nullopt;
}

}  // namespace

void bind_optim(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<WeightCopyOptions>(module, "WeightCopies",
                                "The weight copies of one optimizer, and their dtype.")
      .def(py::init<at::ScalarType>(), py::arg("dtype"))
      .def_readonly("dtype", &WeightCopyOptions::dtype);
  module.def("sgd_step", wrap_pybind_function(sgd_step), py::arg("optimizer"), py::arg("gate"),
             "One fused step of an SGD optimizer, behind a gate or None. Returns (index of group, "
             "parameter) for what is left to torch's own step.");
  module.def("master_from_rest", wrap_pybind_function(optim::master_from_rest), py::arg("param"),
             py::arg("rest"), "The float32 master of a 16-bit parameter and its int16 rest.");
  module.def("rest_from_master", wrap_pybind_function(optim::rest_from_master), py::arg("param"),
             py::arg("master"), "What a 16-bit parameter lacks of a float32 master.");
  bind_moment_codes(module);
  module.def("set_starting_masters",
             wrap_pybind_function(
                 [](const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& masters) {
                   optim::set_starting_masters(params, masters);
                 }),
             py::arg("params"), py::arg("masters"),
             "Keeps float32 values of parameters until an optimizer's first step takes them.");
  module.def("starting_master_of", wrap_pybind_function(optional_of<optim::starting_master_of>),
             py::arg("param"), "The values kept for a parameter; None without them.");
  module.def("take_starting_master", wrap_pybind_function(optional_of<optim::take_starting_master>),
             py::arg("param"), "The same, and forgets them.");
  module.def("adam_step", wrap_pybind_function(adam_step), py::arg("optimizer"), py::arg("gate"),
             "The same for Adam and AdamW.");
  module.def("muon_step", wrap_pybind_function(muon_step), py::arg("optimizer"), py::arg("gate"),
             "The same for Muon.");
}

}  // namespace fastamp::python
