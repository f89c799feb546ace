// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "core/tensor_version.h"
#include "python_optimizer.h"
#include "scaler/gradient_factors.h"
#include "scaler/gradient_pass.h"
#include "scaler/scale_ops.h"

#include <ATen/ops/ones.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

/// Gradients gathered for Python: those C++ can work on, and the parameters of all others.
struct GradientList {
  std::vector<scaler::DeviceGradients> groups;
  Parameters foreign;  ///< Parameters whose gradients are Python tensor subclasses.
};

// As often as they are listed: these are for torch's functions on parameters.
GradientList gather_parameters(const py::object& parameters) {
  scaler::GradientGroups groups(scaler::Purpose::kMultiply);
  groups.keep_repeats();
  GradientList list;
  gather_group(parameters, groups, list.foreign);
  list.groups = groups.release();
  return list;
}

/// Reads gradients once; none if only torch can.
std::optional<at::Tensor> two_norm(const GradientList& list, at::ScalarType dtype) {
  if (!list.foreign.empty() || list.groups.empty() || !scaler::can_check(list.groups) ||
      scaler::has_duplicates(list.groups)) {
    return std::nullopt;
  }
  const auto& first = list.groups.front().gradients.front();
  const auto one = at::ones({}, first.options().dtype(at::kFloat).requires_grad(false));
  return scaler::check(list.groups, one, scaler::flag_without_value(one),
                       {.flag = scaler::FlagUse::kOverwrite})
      .total_norm(dtype);
}

void bind_list(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<GradientList>(module, "GradientList")
      .def_readonly("foreign", &GradientList::foreign)
      .def_property_readonly("norm_dtype",
                             [](const GradientList& list) -> py::object {
                               const auto dtype = promoted_norm_dtype(list.groups);
                               return dtype ? py::cast(*dtype) : py::object(py::none());
                             })
      .def("two_norm", wrap_pybind_function(two_norm), py::arg("dtype"),
           "The norm of gradients that are read for it; None if only torch can know it.")
      .def("recent_norm", wrap_pybind_function([](const GradientList& list, at::ScalarType dtype) {
             return scaler::RecentPasses::get().norm_of(list.groups, dtype);
           }),
           py::arg("dtype"),
           "The norm of gradients that some of the last passes of unscale_ hold, unchanged and "
           "together exactly them; else None.")
      .def("multiply_",
           wrap_pybind_function([](const GradientList& list, const at::Tensor& factor) {
             scaler::multiply_(list.groups, factor);
           }),
           py::arg("factor"));
  module.def("gather_parameters", wrap_pybind_function(gather_parameters), py::arg("parameters"));
}

/// Tensors that somebody writes without torch knowing, such as a replayed graph.
class WrittenTensors {
 public:
  explicit WrittenTensors(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  void increment_versions() const {
    for (const auto& tensor : tensors_) {
      bump_version(tensor);
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace

void bind_gradients(py::module_& module) {
  using torch::wrap_pybind_function;
  bind_list(module);
  py::class_<WrittenTensors>(module, "WrittenTensors",
                             "Tensors that are written without torch knowing.")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("tensors"))
      .def("increment_versions", &WrittenTensors::increment_versions,
           "Counts a write to each, as an in-place operator of torch does.");
  module.def("clip_coefficient", wrap_pybind_function(scaler::clip_coefficient),
             py::arg("total_norm"), py::arg("max_norm"));
}

}  // namespace fastamp::python
