#include "bind_scaler.h"

#include "gather.h"
#include "scaler/gradient_groups.h"
#include "scaler/scale_ops.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

std::pair<at::Tensor, at::Tensor> begin_unscale(const at::Tensor& scale) {
  return {scaler::inverse_scale(scale), scaler::new_flag(scale)};
}

py::tuple unscale_gradients(py::handle optimizer, const at::Tensor& inv_scale,
                            const at::Tensor& found_inf, bool allow_fp16) {
  scaler::GradientGroups groups(allow_fp16);
  auto foreign = gather_gradients(optimizer, groups);
  std::vector<scaler::DeviceFlag> flags;
  {
    const py::gil_scoped_release no_gil;
    flags = groups.unscale_(inv_scale, found_inf);
  }
  py::dict flag_of_device;
  for (auto& flag : flags) {
    flag_of_device[py::cast(flag.device)] = py::cast(std::move(flag.found_inf));
  }
  return py::make_tuple(std::move(flag_of_device), std::move(foreign));
}

void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker,
                  const std::vector<at::Tensor>& flags, double growth_factor, double backoff_factor,
                  int64_t growth_interval, const std::optional<at::Tensor>& hysteresis_tracker,
                  int64_t hysteresis, std::optional<double> min_scale,
                  std::optional<double> max_scale) {
  scaler::ScaleTensors tensors{scale, growth_tracker, hysteresis_tracker.value_or(at::Tensor())};
  const scaler::ScaleRules rules{growth_factor, backoff_factor, growth_interval,
                                 hysteresis,    min_scale,      max_scale};
  scaler::update_scale(tensors, rules, flags);
}

}  // namespace

void bind_scaler(py::module_& module) {
  using torch::wrap_pybind_function;
  module.def("begin_unscale", wrap_pybind_function(begin_unscale), py::arg("scale"),
             "Returns (1 / scale, a fresh non-finite flag) on scale's device.");
  module.def("unscale_gradients", wrap_pybind_function(unscale_gradients), py::arg("optimizer"),
             py::arg("inv_scale"), py::arg("found_inf"), py::arg("allow_fp16"),
             "Unscales an optimizer's gradients in place. Returns the flag of each device and the "
             "parameters whose gradients are Python subclasses, which were left alone.");
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
             "Moves the scale after an iteration with the given flags.");
}

}  // namespace fastamp::python
