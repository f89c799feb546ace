// SPDX-License-Identifier: Apache-2.0
#include "step_gate.h"

#include "bindings.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace fastamp::python {

namespace py = pybind11;

std::shared_ptr<PythonGate> PythonGate::for_device(c10::Device device) {
  for (const auto& [where, copy] : copies_) {
    if (where == device) {
      return copy;
    }
  }
  auto copy = std::make_shared<PythonGate>(optim::gate_on(gate_, device));
  copies_.emplace_back(device, copy);
  return copy;
}

optim::StepGate read_gate(py::handle gate) {
  return gate.is_none() ? optim::StepGate{} : py::cast<const PythonGate&>(gate).gate();
}

void bind_step_gate(py::module_& module) {
  using torch::wrap_pybind_function;
  using MaybeTensor = std::optional<at::Tensor>;
  py::class_<PythonGate, std::shared_ptr<PythonGate>>(
      module, "StepGate",
      "Everything that happens to gradients between backward and an optimizer, and if it steps.")
      .def(py::init([](MaybeTensor inv_scale, MaybeTensor clip_coef, MaybeTensor found_inf,
                       std::optional<double> clip_value, bool write_grads) {
             return std::make_shared<PythonGate>(optim::StepGate{.inv_scale = std::move(inv_scale),
                                                                 .clip_coef = std::move(clip_coef),
                                                                 .found_inf = std::move(found_inf),
                                                                 .clip_value = clip_value,
                                                                 .write_grads = write_grads});
           }),
           py::arg("inv_scale") = py::none(), py::arg("clip_coef") = py::none(),
           py::arg("found_inf") = py::none(), py::arg("clip_value") = py::none(),
           py::arg("write_grads") = true)
      .def_property_readonly("inv_scale", [](const PythonGate& g) { return g.gate().inv_scale; })
      .def_property_readonly("clip_coef", [](const PythonGate& g) { return g.gate().clip_coef; })
      .def_property_readonly("found_inf", [](const PythonGate& g) { return g.gate().found_inf; })
      .def_property_readonly("clip_value", [](const PythonGate& g) { return g.gate().clip_value; })
      .def_property_readonly("write_grads",
                             [](const PythonGate& g) { return g.gate().write_grads; })
      .def("for_device", wrap_pybind_function(&PythonGate::for_device), py::arg("device"));
}

}  // namespace fastamp::python
