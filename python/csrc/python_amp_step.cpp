// SPDX-License-Identifier: Apache-2.0
#include "python_amp_step.h"

#include "bindings.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace fastamp::python {

namespace py = pybind11;

std::shared_ptr<PythonAmpStep> PythonAmpStep::for_device(c10::Device device) {
  for (const auto& [where, copy] : copies_) {
    if (where == device) {
      return copy;
    }
  }
  auto copy = std::make_shared<PythonAmpStep>(optim::amp_step_on(amp_step_, device));
  copies_.emplace_back(device, copy);
  return copy;
}

void bind_amp_step(py::module_& module) {
  using torch::wrap_pybind_function;
  using MaybeTensor = std::optional<at::Tensor>;
  py::class_<PythonAmpStep, std::shared_ptr<PythonAmpStep>>(
      module, "AmpStep",
      "Everything that happens to gradients between backward and an optimizer, and if it steps.")
      .def(
          py::init([](MaybeTensor inv_scale, MaybeTensor clip_coef, MaybeTensor found_inf,
                      std::optional<double> clip_value, bool write_grads) {
            return std::make_shared<PythonAmpStep>(optim::AmpStep{.inv_scale = std::move(inv_scale),
                                                                  .clip_coef = std::move(clip_coef),
                                                                  .found_inf = std::move(found_inf),
                                                                  .clip_value = clip_value,
                                                                  .write_grads = write_grads});
          }),
          py::arg("inv_scale") = py::none(), py::arg("clip_coef") = py::none(),
          py::arg("found_inf") = py::none(), py::arg("clip_value") = py::none(),
          py::arg("write_grads") = true)
      .def_property_readonly("inv_scale",
                             [](const PythonAmpStep& g) { return g.amp_step().inv_scale; })
      .def_property_readonly("clip_coef",
                             [](const PythonAmpStep& g) { return g.amp_step().clip_coef; })
      .def_property_readonly("found_inf",
                             [](const PythonAmpStep& g) { return g.amp_step().found_inf; })
      .def_property_readonly("clip_value",
                             [](const PythonAmpStep& g) { return g.amp_step().clip_value; })
      .def_property_readonly("write_grads",
                             [](const PythonAmpStep& g) { return g.amp_step().write_grads; })
      .def("forget_positions", &PythonAmpStep::forget_positions,
           "Says that code of others runs before the step, which then reads gradients from "
           "parameters and not from the list that was checked.")
      .def("for_device", wrap_pybind_function(&PythonAmpStep::for_device), py::arg("device"));
}

}  // namespace fastamp::python
