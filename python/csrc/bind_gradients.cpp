#include "bind_gradients.h"

#include "gather.h"
#include "gradient_list.h"
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
using scaler::GradientPass;
using scaler::PassMemory;

py::dict flags_of(const GradientPass& pass) {
  py::dict flags;
  for (const auto& result : pass.devices()) {
    flags[py::cast(result.seen.device)] = py::cast(result.found_inf);
  }
  return flags;
}

py::tuple unscale_gradients(py::handle optimizer, const at::Tensor& inv_scale,
                            const at::Tensor& found_inf, bool allow_fp16, PassMemory* memory,
                            bool own_flag, bool with_norm) {
  GradientGroups groups(allow_fp16);
  auto foreign = gather_gradients(optimizer, groups);
  std::shared_ptr<GradientPass> pass;
  {
    const py::gil_scoped_release no_gil;
    pass = std::make_shared<GradientPass>(groups.release(), inv_scale, found_inf,
                                          scaler::PassOptions{.own_flag = own_flag,
                                                              .with_norm = with_norm,
                                                              .max_norm = std::nullopt,
                                                              .memory = memory});
  }
  auto flags = flags_of(*pass);
  return py::make_tuple(std::move(flags), std::move(foreign), std::move(pass));
}

// Whether a read-only pass can take the place of unscaling: our kernels exist and take the dtypes.
bool can_check(const GradientList& list) {
  for (const auto& group : list.groups) {
    if (group.any_double || !scaler::has_native_kernels(group.device.type())) {
      return false;
    }
  }
  return list.foreign.empty();
}

GradientList gather_optimizer(py::handle optimizer, bool coalesce) {
  GradientGroups groups(/*allow_fp16=*/true);
  if (coalesce) {
    groups.coalesce_sparse();
  }
  GradientList list;
  list.foreign = gather_gradients(optimizer, groups);
  list.groups = groups.release();
  return list;
}

GradientList gather_parameters(const py::object& parameters) {
  GradientGroups groups(/*allow_fp16=*/true);
  GradientList list;
  gather_group(parameters, groups, list.foreign);
  list.groups = groups.release();
  return list;
}

std::shared_ptr<GradientPass> check_gradients(py::handle optimizer, const at::Tensor& inv_scale,
                                              const at::Tensor& found_inf, PassMemory* memory,
                                              std::optional<double> max_norm) {
  GradientGroups groups(/*allow_fp16=*/true);
  GradientList list;
  list.foreign = gather_gradients(optimizer, groups);
  list.groups = groups.release();
  if (!can_check(list)) {
    return nullptr;
  }
  const py::gil_scoped_release no_gil;
  return std::make_shared<GradientPass>(
      std::move(list.groups), inv_scale, found_inf,
      scaler::PassOptions{
          .read_only = true, .own_flag = true, .max_norm = max_norm, .memory = memory});
}

std::shared_ptr<GradientPass> norm_of(GradientList& list) {
  if (!can_check(list) || list.groups.empty()) {
    return nullptr;
  }
  const auto& first = list.groups.front().gradients.front();
  const auto one = at::ones({}, first.options().dtype(at::kFloat).requires_grad(false));
  return std::make_shared<GradientPass>(
      list.groups, one, scaler::new_flag(one),
      scaler::PassOptions{.read_only = true, .own_flag = true, .max_norm = std::nullopt});
}

// The dtype that torch's norms of these gradients have after torch.stack; none if one has no norm.
std::optional<at::ScalarType> norm_dtype(const GradientList& list) {
  std::optional<at::ScalarType> dtype;
  for (const auto& group : list.groups) {
    for (const auto& gradient : group.gradients) {
      const auto own = gradient.scalar_type();
      if (!at::isFloatingType(own) || gradient.layout() != at::kStrided) {
        return std::nullopt;
      }
      dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
    }
  }
  return dtype;
}

// (device, positions of the parameters, int64 [n, 2] counts) of every device that was counted.
py::list counts_of(const GradientPass& pass) {
  py::list counts;
  for (const auto& result : pass.devices()) {
    if (result.counts != nullptr) {
      counts.append(py::cast(result.counts));
    }
  }
  return counts;
}

py::object only_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::object(py::none());
}

void bind_pass(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<PassMemory>(module, "PassMemory").def(py::init<>());
  py::class_<scaler::NonFiniteCounts, std::shared_ptr<scaler::NonFiniteCounts>>(module,
                                                                                "NonFiniteCounts")
      .def_property_readonly(
          "device", [](const scaler::NonFiniteCounts& counts) { return py::cast(counts.device); })
      .def_readonly("positions", &scaler::NonFiniteCounts::positions)
      .def_readonly("counts", &scaler::NonFiniteCounts::counts);
  py::class_<GradientPass, std::shared_ptr<GradientPass>>(module, "GradientPass")
      .def_property_readonly("flags", flags_of)
      .def_property_readonly("counts", counts_of)
      .def_property_readonly("has_norm", &GradientPass::has_norm)
      .def_property_readonly("clip_coef",
                             [](const GradientPass& pass) {
                               return pass.devices().size() == 1
                                          ? only_tensor(pass.devices().front().clip_coef)
                                          : py::none();
                             })
      .def("total_norm", wrap_pybind_function(&GradientPass::total_norm), py::arg("dtype"))
      .def("holds",
           [](const GradientPass& pass, const GradientList& list) {
             return list.foreign.empty() && pass.holds(list.groups);
           })
      .def("forget", &GradientPass::forget);
}

void bind_list(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<GradientList>(module, "GradientList")
      .def_readonly("foreign", &GradientList::foreign)
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
  module.def("norm_of_passes",
             wrap_pybind_function([](const std::vector<std::shared_ptr<GradientPass>>& passes,
                                     const GradientList& list, at::ScalarType dtype) {
               std::vector<const GradientPass*> pointers;
               pointers.reserve(passes.size());
               for (const auto& pass : passes) {
                 pointers.push_back(pass.get());
               }
               return scaler::norm_of_passes(pointers, list.groups, dtype);
             }),
             py::arg("passes"), py::arg("gradients"), py::arg("dtype"),
             "The norm of gradients that some passes hold, unchanged and together exactly them; "
             "else None.");
  module.def("gather_optimizer", wrap_pybind_function(gather_optimizer), py::arg("optimizer"),
             py::arg("coalesce"));
  module.def("gather_parameters", wrap_pybind_function(gather_parameters), py::arg("parameters"));
}

}  // namespace

void bind_gradients(py::module_& module) {
  using torch::wrap_pybind_function;
  bind_pass(module);
  bind_list(module);
  module.def("unscale_gradients", wrap_pybind_function(unscale_gradients), py::arg("optimizer"),
             py::arg("inv_scale"), py::arg("found_inf"), py::arg("allow_fp16"), py::arg("memory"),
             py::arg("own_flag"), py::arg("with_norm"),
             "Unscales an optimizer's gradients in place. Returns the flag of each device, the "
             "parameters whose gradients are Python subclasses, which were left alone, and the "
             "pass.");
  module.def("check_gradients", wrap_pybind_function(check_gradients), py::arg("optimizer"),
             py::arg("inv_scale"), py::arg("found_inf"), py::arg("memory"), py::arg("max_norm"),
             "Checks an optimizer's gradients without writing them. Returns the pass, or None if "
             "there is a gradient that only unscaling can handle.");
  module.def("clip_coefficient", wrap_pybind_function(scaler::clip_coefficient),
             py::arg("total_norm"), py::arg("max_norm"));
  py::class_<scaler::Readback>(module, "Readback")
      .def(py::init<const std::vector<at::Tensor>&>(), py::arg("scalars"))
      .def("ready", wrap_pybind_function(&scaler::Readback::ready))
      .def("values", wrap_pybind_function(&scaler::Readback::values));
}

}  // namespace fastamp::python
