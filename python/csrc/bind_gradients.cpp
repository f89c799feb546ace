#include "bindings.h"
#include "core/tensor_kind.h"
#include "gather.h"
#include "gradient_list.h"
#include "scaler/gradient_factors.h"
#include "scaler/gradient_pass.h"
#include "scaler/readback.h"
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

using scaler::GradientGroups;
using scaler::PassResult;

GradientList gather_optimizer(py::handle optimizer, bool coalesce) {
  GradientGroups groups(/*allow_fp16=*/true);
  if (coalesce) {
    groups.coalesce_sparse();
  }
  GradientList list;
  list.foreign = gather_gradients(optimizer, groups);
  list.shared = groups.any_repeats() && may_share_gradients(optimizer);
  list.groups = groups.release();
  return list;
}

// As often as they are listed: these are for torch's functions on parameters.
GradientList gather_parameters(const py::object& parameters) {
  GradientGroups groups(/*allow_fp16=*/true);
  groups.keep_repeats();
  GradientList list;
  gather_group(parameters, groups, list.foreign);
  list.groups = groups.release();
  return list;
}

std::shared_ptr<PassResult> norm_of(GradientList& list) {
  if (!list.foreign.empty() || list.groups.empty() || !scaler::can_check(list.groups)) {
    return nullptr;
  }
  const auto& first = list.groups.front().gradients.front();
  const auto one = at::ones({}, first.options().dtype(at::kFloat).requires_grad(false));
  return std::make_shared<PassResult>(
      scaler::check(list.groups, one, scaler::new_flag(one), {.own_flag = true}));
}

// The dtype that torch's norms of these gradients have after torch.stack; none if one has no norm.
std::optional<at::ScalarType> norm_dtype(const GradientList& list) {
  std::optional<at::ScalarType> dtype;
  for (const auto& group : list.groups) {
    for (const auto& gradient : group.gradients) {
      const auto own = gradient.scalar_type();
      if (!at::isFloatingType(own) || !has_geometry(gradient)) {
        return std::nullopt;
      }
      dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
    }
  }
  return dtype;
}

void bind_list(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<GradientList>(module, "GradientList")
      .def_readonly("foreign", &GradientList::foreign)
      .def_readonly("shared", &GradientList::shared)
      .def_property_readonly(
          "has_duplicates",
          [](const GradientList& list) { return scaler::has_duplicates(list.groups); })
      .def_property_readonly("norm_dtype",
                             [](const GradientList& list) -> py::object {
                               const auto dtype = norm_dtype(list);
                               return dtype ? py::cast(*dtype) : py::object(py::none());
                             })
      .def_property_readonly("tensors",
                             [](const GradientList& list) {
                               std::vector<at::Tensor> all;
                               for (const auto& group : list.groups) {
                                 all.insert(all.end(), group.gradients.begin(),
                                            group.gradients.end());
                               }
                               return all;
                             })
      .def("norm_pass", wrap_pybind_function(norm_of))
      .def("multiply_",
           wrap_pybind_function([](const GradientList& list, const at::Tensor& factor) {
             scaler::multiply_(list.groups, factor);
           }),
           py::arg("factor"));
  module.def("gather_optimizer", wrap_pybind_function(gather_optimizer), py::arg("optimizer"),
             py::arg("coalesce"));
  module.def("gather_parameters", wrap_pybind_function(gather_parameters), py::arg("parameters"));
}

}  // namespace

void bind_gradients(py::module_& module) {
  using torch::wrap_pybind_function;
  bind_list(module);
  module.def("clip_coefficient", wrap_pybind_function(scaler::clip_coefficient),
             py::arg("total_norm"), py::arg("max_norm"));
  py::class_<scaler::Readback>(module, "Readback")
      .def(py::init<const std::vector<at::Tensor>&>(), py::arg("scalars"))
      .def("ready", wrap_pybind_function(&scaler::Readback::ready))
      .def("values", wrap_pybind_function(&scaler::Readback::values));
}

}  // namespace fastamp::python
