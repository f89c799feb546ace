// SPDX-License-Identifier: Apache-2.0
#include "autocast/float8_interface.h"
#include "bindings.h"
#include "float8/decision.h"
#include "float8/dynamo_guard_state.h"
#include "float8/exclusions.h"
#include "float8/float8_cast.h"
#include "float8/gradient_sum.h"
#include "float8/linear.h"
#include "float8/plan.h"
#include "float8/recipe.h"
#include "trace/trace_text.h"

#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/float8_plan.h>

#include <c10/core/Device.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fastamp::python {
namespace {

/// The fields of Python's Float8Recipe, in its order.
using Float8Fields = std::tuple<c10::ScalarType, c10::ScalarType, Float8Recipe::FastAccumulate,
                                std::vector<std::string>, std::optional<Float8Recipe::Size>>;

Float8Recipe to_recipe(const Float8Fields& fields) {
  const auto& [forward_dtype, grad_dtype, fast_accumulate, ops, small_size] = fields;
  auto recipe = Float8Recipe()
                    .forward_dtype(forward_dtype)
                    .grad_dtype(grad_dtype)
                    .fast_accumulate(fast_accumulate)
                    .ops(ops);
  if (small_size.has_value()) {
    recipe.small_size((*small_size)[0], (*small_size)[1]);
  }
  return recipe;
}

Float8Fields to_fields(const Float8Recipe& recipe) {
  return {recipe.forward_dtype(), recipe.grad_dtype(), recipe.fast_accumulate(), recipe.ops(),
          recipe.small_size()};
}

std::uint32_t number_of(const autocast::Float8Setting* setting) {
  return setting == nullptr ? 0 : setting->number;
}

void check_recipe(const Float8Fields& fields) {
  autocast::float8_setting("float8.Recipe", to_recipe(fields), c10::kBFloat16);
}

std::uint32_t number_of_region(const std::string& device, const Float8Fields& fields,
                               c10::ScalarType base_dtype) {
  return number_of(autocast::float8_of_region("autocast", c10::Device(device).type(),
                                              to_recipe(fields), base_dtype));
}

/// Default of regions that have no recipe of their own; none ends it.
void set_default(const std::string& device_name, const std::optional<Float8Fields>& fields) {
  const auto device = c10::Device(device_name).type();
  if (fields.has_value()) {
    autocast::start_default_float8("autocast", device, to_recipe(*fields));
  } else {
    autocast::set_default_float8(device, nullptr);
  }
}

std::pair<bool, bool> default_use(const std::string& device_name) {
  const auto use = autocast::default_float8_use(c10::Device(device_name).type());
  return {use.acted, use.met_float16};
}

std::optional<Float8Fields> fields_in_force(const std::string& device) {
  const auto recipe = float8_recipe(c10::Device(device).type());
  return recipe.has_value() ? std::optional(to_fields(*recipe)) : std::nullopt;
}

Float8Fields fields_of_number(std::uint32_t number) {
  return to_fields(autocast::recipe_of(*autocast::float8_setting_numbered(number)));
}

using Numbers = std::pair<std::uint32_t, std::uint32_t>;

/// Returns what this thread's regions have set for cpu and cuda.
Numbers thread_numbers() {
  return {number_of(autocast::thread_float8(c10::kCPU)),
          number_of(autocast::thread_float8(c10::kCUDA))};
}

void set_thread_numbers(Numbers numbers) {
  autocast::set_thread_float8(c10::kCPU, autocast::float8_setting_numbered(numbers.first));
  autocast::set_thread_float8(c10::kCUDA, autocast::float8_setting_numbered(numbers.second));
}

/// The setting that a plan follows, whether or not this machine has fp8.
std::uint32_t number_of_plan(const Float8Fields& fields, c10::ScalarType base_dtype) {
  return number_of(autocast::float8_setting("float8.plan", to_recipe(fields), base_dtype));
}

/// Returns what a plan has recorded: a dict for each call.
py::list rows_of(const autocast::Float8Calls& calls) {
  py::list rows;
  for (const auto& [op, row, weight] : calls.calls()) {
    py::dict out;
    out["op"] = to_string(op);
    out["m"] = row.shape.m;
    out["k"] = row.shape.k;
    out["n"] = row.shape.n;
    out["x_dtype"] = autocast::dtype_name(row.shape.x_dtype);
    out["float8"] = row.float8;
    out["base_dtype_saved_bytes"] = row.base_dtype_saved_bytes;
    out["saved_bytes"] = row.saved_bytes;
    out["weight"] = weight.defined() ? py::cast(weight) : py::none();
    rows.append(out);
  }
  return rows;
}

/// Python's answer about a tensor. The function is never released: threads may
/// run ops while the process exits.
template <int kQuestion>
struct PythonQuestion {
  static inline PyObject* function = nullptr;

  static bool ask(const at::Tensor& tensor) {
    const py::gil_scoped_acquire gil;
    return py::handle(function)(tensor).cast<bool>();
  }
};
using IsTraced = PythonQuestion<0>;
using IsParameter = PythonQuestion<1>;
using IsExcluded = PythonQuestion<2>;
using IsPart = PythonQuestion<3>;
using HasIdleHooks = PythonQuestion<4>;

void ask_of_idle_hooks(const py::object& are_idle) {
  HasIdleHooks::function = are_idle.inc_ref().ptr();
  autocast::ask_of_idle_hooks(HasIdleHooks::ask);
}

void set_python_tensors(const py::object& is_traced, const py::object& is_parameter,
                        const py::object& is_excluded) {
  IsTraced::function = is_traced.inc_ref().ptr();
  IsParameter::function = is_parameter.inc_ref().ptr();
  IsExcluded::function = is_excluded.inc_ref().ptr();
  static constexpr autocast::PythonTensors kFunctions{
      .is_traced = IsTraced::ask, .is_parameter = IsParameter::ask, .is_excluded = IsExcluded::ask};
  autocast::set_python_tensors(&kFunctions);
}

/// Python's linear layer of parts; never released, as the functions above.
PyObject* g_linear_of_parts = nullptr;

at::Tensor linear_of_parts_in_python(const autocast::Float8Setting& setting, const at::Tensor& x,
                                     const at::Tensor& weight, const at::Tensor& bias) {
  const py::gil_scoped_acquire gil;
  const auto given = bias.defined() ? std::optional(bias) : std::nullopt;
  const py::object y = py::handle(g_linear_of_parts)(setting.number, x, weight, given);
  return y.is_none() ? at::Tensor() : y.cast<at::Tensor>();
}

void set_linear_of_parts(const py::object& is_part, const py::object& run) {
  IsPart::function = is_part.inc_ref().ptr();
  g_linear_of_parts = run.inc_ref().ptr();
  static constexpr autocast::LinearOfParts kFunctions{.is_part = IsPart::ask,
                                                      .run = linear_of_parts_in_python};
  autocast::set_linear_of_parts(&kFunctions);
}

/// A Python function that any thread may call and forget.
autocast::AgreeOnAmax to_agree(const py::object& function) {
  if (function.is_none()) {
    return {};
  }
  const std::shared_ptr<PyObject> held(function.inc_ref().ptr(), [](PyObject* object) {
    const py::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  return [held](const at::Tensor& amax) {
    const py::gil_scoped_acquire gil;
    py::handle(held.get())(amax);
  };
}

using MaybeTensor = std::optional<at::Tensor>;

at::Tensor linear_of_parts(std::uint32_t number, const at::Tensor& x, const at::Tensor& weight,
                           const MaybeTensor& bias, const MaybeTensor& x_amax,
                           const MaybeTensor& weight_amax,
                           const std::optional<std::pair<at::Tensor, at::Tensor>>& weight_cast,
                           bool adds_bias, const py::object& agree) {
  autocast::Float8Parts parts{.x_amax = x_amax.value_or(at::Tensor()),
                              .weight_amax = weight_amax.value_or(at::Tensor()),
                              .weight = {},
                              .adds_bias = adds_bias,
                              .agree = to_agree(agree)};
  if (weight_cast.has_value()) {
    parts.weight.rows = weight_cast->first;
    parts.weight.inverse_scale = weight_cast->second;
  }
  const py::gil_scoped_release no_gil;
  return autocast::float8_linear_of_parts(*autocast::float8_setting_numbered(number), x, weight,
                                          bias.value_or(at::Tensor()), parts);
}

/// Whether a region with the recipe multiplies by such a weight in fp8.
bool runs_in_float8(const Float8Fields& fields, const at::Tensor& weight) {
  const auto& setting =
      *autocast::float8_setting("float8.Recipe", to_recipe(fields), c10::kBFloat16);
  if (weight.dim() != 2 || !setting.runs(autocast::Float8Op::linear) ||
      autocast::is_excluded_from_float8(weight)) {
    return false;
  }
  Float8Recipe recipe = to_recipe(fields);
  if (!weight.device().is_cuda() && !recipe.small_size().has_value()) {
    recipe.small_size(0, 0);  // A plan is for GPUs.
  }
  const Float8Shape shape{.m = 1,
                          .k = weight.size(1),
                          .n = weight.size(0),
                          .x_dtype = c10::kBFloat16,
                          .weight_dtype = weight.scalar_type()};
  return float8_plan({shape}, recipe).front().float8 == "float8";
}

/// The rows of a part in fp8, and the inverse of the whole's scale.
std::pair<at::Tensor, at::Tensor> cast_part(const at::Tensor& matrix, const at::Tensor& amax,
                                            c10::ScalarType to) {
  const auto cast = autocast::cast_part_to_float8(matrix, amax, to, {.rows = true});
  return {cast.rows, cast.inverse_scale};
}

}  // namespace

void bind_float8(py::module_& module) {
  module.def("check_float8_recipe", torch::wrap_pybind_function(check_recipe));
  module.def("check_float8_dtype", torch::wrap_pybind_function([](c10::ScalarType dtype) {
               autocast::check_float8_dtype("autocast", dtype);
             }));
  module.def("float8_number", torch::wrap_pybind_function(number_of_region));
  module.def("float8_recipe", torch::wrap_pybind_function(fields_in_force));
  module.def("float8_recipe_numbered", torch::wrap_pybind_function(fields_of_number));
  module.def("set_default_float8", torch::wrap_pybind_function(set_default));
  module.def("default_float8_use", torch::wrap_pybind_function(default_use));
  module.def("float8_numbers", thread_numbers);
  module.def("set_float8_numbers", set_thread_numbers);
  module.def("can_mirror_float8", autocast::can_mirror_float8);
  module.def("ask_of_idle_hooks", ask_of_idle_hooks);
  module.def("set_python_tensors", set_python_tensors);
  module.def("set_float8_linear_of_parts", set_linear_of_parts);
  module.def("float8_linear_of_parts", torch::wrap_pybind_function(linear_of_parts));
  module.def("runs_in_float8", torch::wrap_pybind_function(runs_in_float8));
  module.def("float8_amax", torch::wrap_pybind_function(autocast::float8_amax));
  module.def("cast_part_to_float8", torch::wrap_pybind_function(cast_part));
  module.def("is_excluded_from_float8", autocast::is_excluded_from_float8);
  module.def("are_weights_excluded_from_float8", autocast::are_weights_excluded_from_float8);
  module.def("exclude_from_float8", autocast::exclude_from_float8);
  module.def("end_float8_exclusion", autocast::end_float8_exclusion);
  module.def("float8_number_of_plan", torch::wrap_pybind_function(number_of_plan));
  py::class_<autocast::Float8Calls>(module, "Float8Calls")
      .def(py::init<>())
      .def("start", &autocast::Float8Calls::start)
      .def("stop", &autocast::Float8Calls::stop)
      .def("rows", rows_of);
}

}  // namespace fastamp::python
