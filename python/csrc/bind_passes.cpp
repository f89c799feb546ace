#include "bindings.h"
#include "gather.h"
#include "gradient_list.h"
#include "scaler/gradient_pass.h"
#include "scaler/scale_ops.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

using scaler::GradientGroups;
using scaler::PassResult;

/// What a scaler keeps of one optimizer's passes. Guarded by the GIL.
struct OptimizerPasses : scaler::PassMemory {
  std::shared_ptr<PassResult> latest;  ///< Null: none in this iteration.
  py::object flag;                     ///< The found_inf of the last unscale_, a Python tensor.
};

/// The flag of an earlier pass, lowered, if it is in ordinary host memory and nobody else holds it
/// or its memory; else a new one. Making and ending a Python tensor takes a sixth of a short pass.
at::Tensor lowered_flag(const py::object& earlier, const at::Tensor& scale) {
  if (earlier.ptr() != nullptr && Py_REFCNT(earlier.ptr()) == 1) {
    const auto& flag = THPVariable_Unpack(earlier.ptr());
    if (flag.use_count() == 1 && flag.storage().use_count() == 1 &&
        flag.is_inference() == c10::InferenceMode::is_enabled() &&
        scaler::is_plain_cpu_scalar(flag, at::kFloat) && scale.device().is_cpu()) {
      *flag.mutable_data_ptr<float>() = 0.0F;
      return flag;
    }
  }
  return scaler::new_flag(scale);
}

/// Passes of unscale_ whose gradients may still be as the pass left them. A pass holds its
/// gradients only until the step, so one without them matches nothing. Guarded by the GIL.
class RecentPasses {
 public:
  void remember(const std::shared_ptr<PassResult>& pass) {
    passes_.at(next_) = pass;
    next_ = (next_ + 1) % passes_.size();
  }

  std::optional<at::Tensor> norm_of(const GradientList& list, at::ScalarType dtype) const {
    std::vector<std::shared_ptr<const PassResult>> alive;
    std::vector<const PassResult*> pointers;
    for (std::size_t i = 0; i < passes_.size(); ++i) {  // The oldest first.
      if (auto pass = passes_.at((next_ + i) % passes_.size()).lock()) {
        pointers.push_back(pass.get());
        alive.push_back(std::move(pass));
      }
    }
    return pointers.empty() ? std::nullopt : scaler::norm_of_passes(pointers, list.groups, dtype);
  }

 private:
  std::array<std::weak_ptr<const PassResult>, 4> passes_;
  std::size_t next_ = 0;
};

/// Never destroyed: daemon threads may be at work while the process exits.
RecentPasses& recent_passes() {
  static auto* recent = new RecentPasses;
  return *recent;
}

py::dict flags_of(const PassResult& pass) {
  py::dict flags;
  for (const auto& result : pass.devices()) {
    flags[py::cast(result.seen.device)] = py::cast(result.found_inf);
  }
  return flags;
}

py::tuple unscale_gradients(py::handle optimizer, const at::Tensor& inv_scale,
                            const at::Tensor& found_inf, bool allow_fp16, OptimizerPasses* memory,
                            bool own_flag, bool with_norm) {
  GradientGroups groups(allow_fp16, scaler::Use::kPassNext);
  auto foreign = gather_gradients(optimizer, groups);
  std::shared_ptr<PassResult> pass;
  {
    const py::gil_scoped_release no_gil;
    pass = std::make_shared<PassResult>(scaler::unscale(groups.release(), inv_scale, found_inf,
                                                        {.own_flag = own_flag, .memory = memory},
                                                        with_norm));
  }
  auto flags = flags_of(*pass);
  return py::make_tuple(std::move(flags), std::move(foreign), std::move(pass));
}

// The same by 1 / scale, with a flag of its own, for gradients that are all ours: in one call.
py::object unscale_optimizer(py::handle optimizer, const at::Tensor& scale,
                             const std::optional<at::Tensor>& inv_scale, OptimizerPasses& memory) {
  // What may run code of others comes before the gradients are collected or after the pass. To let
  // the gradients of an earlier pass go is such a thing.
  memory.latest.reset();
  const auto flag = lowered_flag(memory.flag, scale);
  const auto inverse = inv_scale ? *inv_scale : memory.inverse_of(scale);
  GradientGroups groups(/*allow_fp16=*/false, scaler::Use::kPassNext);
  if (!gather_gradients(optimizer, groups).empty()) {
    return py::none();
  }
  {
    const py::gil_scoped_release no_gil;
    memory.latest = std::make_shared<PassResult>(
        scaler::unscale(groups.release(), inverse, flag, {.own_flag = true, .memory = &memory}));
  }
  recent_passes().remember(memory.latest);
  memory.flag = py::cast(flag);
  return flags_of(*memory.latest);
}

std::shared_ptr<PassResult> check_gradients(py::handle optimizer, const at::Tensor& inv_scale,
                                            const at::Tensor& found_inf, OptimizerPasses* memory,
                                            std::optional<double> max_norm) {
  GradientGroups groups(/*allow_fp16=*/true, scaler::Use::kPassNext);
  const auto foreign = gather_gradients(optimizer, groups);
  auto gradients = groups.release();
  // A step that writes a gradient of two parameters would write it twice.
  if (!foreign.empty() || !scaler::can_check(gradients) ||
      (groups.any_repeats() && may_share_gradients(optimizer))) {
    return nullptr;
  }
  const py::gil_scoped_release no_gil;
  return std::make_shared<PassResult>(scaler::check(
      std::move(gradients), inv_scale, found_inf, {.own_flag = true, .memory = memory}, max_norm));
}

bool on_host(const at::Tensor& scale, const at::Tensor& growth_tracker,
             const std::vector<at::Tensor>& flags) {
  const auto is_plain = [](const at::Tensor& flag) {
    return scaler::is_plain_cpu_scalar(flag, at::kFloat);
  };
  return !flags.empty() && is_plain(scale) && std::ranges::all_of(flags, is_plain) &&
         scaler::is_plain_cpu_scalar(growth_tracker, at::kInt);
}

using MaybeTensor = std::optional<at::Tensor>;

// Moves the scale by the flags of the only optimizer of an iteration, where all of it is in
// ordinary host memory: in one call, since calls are what such an update costs.
std::optional<std::pair<double, bool>> update_on_host(
    const at::Tensor& scale, const at::Tensor& growth_tracker, const py::dict& flags_by_device,
    double growth_factor, double backoff_factor, int64_t growth_interval,
    const MaybeTensor& hysteresis_tracker, int64_t hysteresis, std::optional<double> min_scale,
    std::optional<double> max_scale, OptimizerPasses& memory, const MaybeTensor& history,
    const MaybeTensor& history_count) {
  std::vector<at::Tensor> flags;
  for (const auto& [device, flag] : flags_by_device) {
    flags.push_back(py::cast<at::Tensor>(flag));
  }
  if (!on_host(scale, growth_tracker, flags)) {
    return std::nullopt;
  }
  scaler::ScaleTensors tensors{scale, growth_tracker, hysteresis_tracker.value_or(at::Tensor())};
  scaler::ScaleRecords records;
  if (history && history_count) {
    records.history = *history;
    records.history_count = *history_count;
    if (memory.latest != nullptr && memory.latest->has_norm()) {
      records.norm = memory.latest->total_norm(at::kFloat);
    }
  }
  scaler::update_scale(
      tensors, {growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale},
      flags, records);
  const bool overflow = std::ranges::any_of(
      flags, [](const at::Tensor& flag) { return *flag.const_data_ptr<float>() != 0.0F; });
  if (!overflow) {  // Else it has counts to tell.
    memory.latest.reset();
  }
  return std::pair(static_cast<double>(*scale.const_data_ptr<float>()), overflow);
}

// False too if it cannot be told: of subclasses, whose gradient is a property, and of sparse ones,
// which clipping replaces by their sums.
bool saw_none(const PassResult& pass, py::handle optimizer) {
  bool any = false;
  const auto all_new =
      for_each_plain(optimizer, [&](const at::Tensor& /*parameter*/, const at::Tensor& gradient) {
        any = true;
        return !gradient.is_sparse() && !pass.saw(gradient);
      });
  return any && all_new;
}

// (device, positions of the parameters, int64 [n, 2] counts) of every device that was counted.
py::list counts_of(const PassResult& pass) {
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
  py::class_<OptimizerPasses>(module, "OptimizerPasses")
      .def(py::init<>())
      .def_readwrite("latest", &OptimizerPasses::latest);
  py::class_<scaler::NonFiniteCounts, std::shared_ptr<scaler::NonFiniteCounts>>(module,
                                                                                "NonFiniteCounts")
      .def_property_readonly(
          "device", [](const scaler::NonFiniteCounts& counts) { return py::cast(counts.device); })
      .def_readonly("positions", &scaler::NonFiniteCounts::positions)
      .def_readonly("counts", &scaler::NonFiniteCounts::counts);
  py::class_<PassResult, std::shared_ptr<PassResult>>(module, "PassResult")
      .def_property_readonly("flags", flags_of)
      .def_property_readonly("counts", counts_of)
      .def_property_readonly("has_norm", &PassResult::has_norm)
      .def_property_readonly("clip_coef",
                             [](const PassResult& pass) {
                               return pass.devices().size() == 1
                                          ? only_tensor(pass.devices().front().clip_coef)
                                          : py::none();
                             })
      .def("total_norm", wrap_pybind_function(&PassResult::total_norm), py::arg("dtype"))
      .def("holds",
           [](const PassResult& pass, const GradientList& list) {
             return list.foreign.empty() && pass.holds(list.groups);
           })
      .def("forget", &PassResult::forget);
}

}  // namespace

void bind_passes(py::module_& module) {
  using torch::wrap_pybind_function;
  bind_pass(module);
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
  module.def(
      "unscale_optimizer", wrap_pybind_function(unscale_optimizer), py::arg("optimizer"),
      py::arg("scale"), py::arg("inv_scale"), py::arg("memory"),
      "Unscales an optimizer's gradients by 1 / scale, leaves the pass in memory and returns "
      "the flag of each device; or does nothing and returns None if there are gradients of "
      "Python subclasses.");
  module.def("saw_none", wrap_pybind_function(saw_none), py::arg("gradient_pass"),
             py::arg("optimizer"),
             "Whether an optimizer has gradients and the pass saw none of them.");
  module.def("update_on_host", wrap_pybind_function(update_on_host), py::arg("scale"),
             py::arg("growth_tracker"), py::arg("flags"), py::arg("growth_factor"),
             py::arg("backoff_factor"), py::arg("growth_interval"), py::arg("hysteresis_tracker"),
             py::arg("hysteresis"), py::arg("min_scale"), py::arg("max_scale"), py::arg("memory"),
             py::arg("history"), py::arg("history_count"),
             "Moves the scale by the flags of one optimizer and the norm of its latest pass, "
             "which it lets go unless a flag was raised. Returns the new scale and whether a flag "
             "was raised; or does nothing and returns "
             "None if anything is not in ordinary host memory.");
  module.def(
      "remember_pass",
      [](const std::shared_ptr<PassResult>& pass) { recent_passes().remember(pass); },
      py::arg("gradient_pass"), "Lets recent_norm() find a pass for as long as it is alive.");
  module.def("recent_norm",
             wrap_pybind_function([](const GradientList& list, at::ScalarType dtype) {
               return recent_passes().norm_of(list, dtype);
             }),
             py::arg("gradients"), py::arg("dtype"),
             "The norm of gradients that some of the passes remembered last hold, unchanged and "
             "together exactly them; else None.");
}

}  // namespace fastamp::python
