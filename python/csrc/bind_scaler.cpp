#include "bindings.h"
#include "kernels/functors/scale_record.h"
#include "scaler/scale_ops.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker,
                  const std::vector<at::Tensor>& flags, double growth_factor, double backoff_factor,
                  int64_t growth_interval, const MaybeTensor& hysteresis_tracker,
                  int64_t hysteresis, std::optional<double> min_scale,
                  std::optional<double> max_scale, const MaybeTensor& inv_scale,
                  const MaybeTensor& norm, const MaybeTensor& history,
                  const MaybeTensor& history_count, const MaybeTensor& new_scale) {
  scaler::ScaleTensors tensors{scale, growth_tracker, hysteresis_tracker.value_or(at::Tensor())};
  const scaler::ScaleRules rules{growth_factor, backoff_factor, growth_interval,
                                 hysteresis,    min_scale,      max_scale};
  scaler::update_scale(tensors, rules, flags,
                       {.inv_scale = inv_scale.value_or(at::Tensor()),
                        .norm = norm.value_or(at::Tensor()),
                        .history = history.value_or(at::Tensor()),
                        .history_count = history_count.value_or(at::Tensor()),
                        .new_scale = new_scale.value_or(at::Tensor())});
}

// The values of scalars that are in ordinary host memory; None if one is not.
std::optional<std::vector<double>> host_values(const std::vector<at::Tensor>& scalars) {
  std::vector<double> values;
  values.reserve(scalars.size());
  for (const auto& scalar : scalars) {
    if (!scaler::is_plain_cpu_scalar(scalar, at::kFloat)) {
      return std::nullopt;
    }
    values.push_back(*scalar.const_data_ptr<float>());
  }
  return values;
}

}  // namespace

void bind_scaler(py::module_& module) {
  using torch::wrap_pybind_function;
  module.attr("HISTORY_COLUMNS") = static_cast<int64_t>(kernels::ScaleHistory::kColumns);
  module.def("inverse_scale", wrap_pybind_function(scaler::inverse_scale), py::arg("scale"),
             "Returns 1 / scale on scale's device.");
  module.def("new_flag", wrap_pybind_function(scaler::new_flag), py::arg("scale"),
             "Returns a non-finite flag on scale's device that nobody has raised.");
  module.def("host_values", wrap_pybind_function(host_values), py::arg("scalars"),
             "Returns the values of fp32 scalars in host memory, or None if one is elsewhere.");
  module.def("combine_flags",
             wrap_pybind_function([](const std::vector<at::Tensor>& flags, c10::Device device) {
               return scaler::combine_flags(flags, device);
             }),
             py::arg("flags"), py::arg("device"), "Returns one flag that is non-zero if any is.");
  module.def("flag_for_optimizer",
             wrap_pybind_function([](const std::vector<at::Tensor>& flags, c10::Device device) {
               return scaler::binary_flag(flags, device);
             }),
             py::arg("flags"), py::arg("device"), "The same as a new tensor, exactly 0 or 1.");
  module.def("update_scale", wrap_pybind_function(update_scale), py::arg("scale"),
             py::arg("growth_tracker"), py::arg("flags"), py::arg("growth_factor"),
             py::arg("backoff_factor"), py::arg("growth_interval"), py::arg("hysteresis_tracker"),
             py::arg("hysteresis"), py::arg("min_scale"), py::arg("max_scale"),
             py::arg("inv_scale"), py::arg("norm"), py::arg("history"), py::arg("history_count"),
             py::arg("new_scale"),
             "Moves the scale after an iteration with the given flags, or to new_scale.");
}

}  // namespace fastamp::python
