// SPDX-License-Identifier: Apache-2.0
#include "autocast/data_cast.h"
#include "autocast/float8_calls.h"
#include "autocast/float8_cast.h"
#include "autocast/float8_constants.h"
#include "autocast/float8_gpu.h"
#include "autocast/float8_rule.h"
#include "autocast/float8_setting.h"
#include "bindings.h"
#include "float8_fields.h"
#include "trace/trace_text.h"

#include <fastamp/autocast/float8_plan.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace fastamp::python {
namespace {

py::dict to_dict(const Float8PlanRow& row) {
  const auto& shape = row.shape;
  py::dict out;
  out["m"] = shape.m;
  out["k"] = shape.k;
  out["n"] = shape.n;
  out["float8"] = row.float8;
  out["carrier_seconds"] = row.carrier_seconds;
  out["float8_seconds"] = row.float8_seconds;
  out["gain"] = row.gain;
  out["carrier_saved_bytes"] = row.carrier_saved_bytes;
  out["saved_bytes"] = row.saved_bytes;
  return out;
}

/// The calls that a model makes in a region with a recipe.
class CallPlan {
 public:
  CallPlan(const std::string& gpu, const Float8Fields& fields, c10::ScalarType carrier)
      : setting_(autocast::float8_setting("float8_plan", to_recipe(fields), carrier)),
        calls_(gpu.empty() ? nullptr : &autocast::float8_gpu_named("float8_plan", gpu)) {}

  std::uint32_t number() const { return setting_->number; }
  void start() { calls_.start(); }
  void stop() { calls_.stop(); }

  /// Each with its op, the dtype of x and the weight.
  py::list rows() const {
    py::list out;
    for (const auto& call : calls_.calls()) {
      py::dict row = to_dict(call.row);
      row["op"] = to_string(call.op);
      row["x_dtype"] = autocast::dtype_name(call.row.shape.x_dtype);
      row["weight"] = call.weight.defined() ? py::cast(call.weight) : py::none();
      out.append(row);
    }
    return out;
  }

 private:
  const autocast::Float8Setting* setting_;
  autocast::Float8Calls calls_;
};

/// A function, so that errors keep their types.
std::unique_ptr<CallPlan> call_plan(const std::string& gpu, const Float8Fields& fields,
                                    c10::ScalarType carrier) {
  return std::make_unique<CallPlan>(gpu, fields, carrier);
}

/// The name of the current GPU in predictions; empty if there is none.
std::string present_gpu() {
  const auto* const gpu = autocast::float8_gpu(c10::kCUDA);
  return gpu == nullptr ? "" : std::string(gpu->name);
}

/// For the program that fits them, and for tests.
py::list constants() {
  py::list out;
  for (const auto& gpu : autocast::kFloat8Gpus) {
    py::dict entry;
    entry["name"] = gpu.name;
    entry["driver_name"] = gpu.driver_name;
    entry["capability"] = gpu.capability;
    entry["multiprocessors"] = gpu.multiprocessors;
    entry["carrier_rate"] = gpu.carrier_rate;
    entry["float8_rate"] = gpu.float8_rate;
    entry["bandwidth"] = gpu.bandwidth;
    entry["launch_seconds"] = gpu.launch_seconds;
    entry["min_work"] = gpu.min_work;
    out.append(entry);
  }
  return out;
}

/// m, k, n, x's dtype, the weight's, whether there is a bias, is dX computed, is dW.
using ShapeFields = std::tuple<std::int64_t, std::int64_t, std::int64_t, c10::ScalarType,
                               c10::ScalarType, bool, bool, bool>;

py::list plan_of_shapes(const std::vector<ShapeFields>& shapes, const std::string& gpu,
                        const Float8Fields& fields, c10::ScalarType carrier) {
  std::vector<Float8Shape> given;
  given.reserve(shapes.size());
  for (const auto& [m, k, n, x_dtype, weight_dtype, has_bias, x_gradient, weight_gradient] :
       shapes) {
    given.push_back({m, k, n, x_dtype, weight_dtype, has_bias, x_gradient, weight_gradient});
  }
  py::list out;
  for (const auto& row : float8_plan(given, gpu, to_recipe(fields), carrier)) {
    out.append(to_dict(row));
  }
  return out;
}

/// For the program that times casts: those that regions make of a plain float32 matrix, or of a
/// bfloat16 or float16 one to fp8; to fp8 in both layouts.
std::vector<at::Tensor> cast_matrix(const at::Tensor& matrix, c10::ScalarType to) {
  const auto from = matrix.scalar_type();
  const bool to_float8 = to == c10::kFloat8_e4m3fn || to == c10::kFloat8_e5m2;
  const bool is_16_bit = from == c10::kBFloat16 || from == c10::kHalf;
  TORCH_CHECK_VALUE(matrix.dim() == 2 && (from == c10::kFloat || (to_float8 && is_16_bit)),
                    "cast_matrix: expected a float32 matrix, or a 16-bit one to fp8, got ", from,
                    " of ", matrix.dim(), " dimensions");
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!to_float8) {
    return autocast::cast_data_together({matrix}, to);
  }
  const auto cast = autocast::cast_to_float8(matrix, to, {.rows = true, .columns = true});
  return {cast.rows, cast.columns, cast.inverse_scale};
}

}  // namespace

void bind_float8_plan(py::module_& module) {
  py::class_<CallPlan>(module, "CallPlan")
      .def_property_readonly("number", &CallPlan::number)
      .def("start", &CallPlan::start)
      .def("stop", &CallPlan::stop)
      .def("rows", &CallPlan::rows);
  module.def("call_plan", torch::wrap_pybind_function(call_plan));
  module.def("float8_gpus", float8_gpus);
  module.def("present_float8_gpu", present_gpu);
  module.def("pretend_float8_gpu", torch::wrap_pybind_function(autocast::pretend_float8_gpu));
  module.def("cast_matrix", torch::wrap_pybind_function(cast_matrix));
  module.def("float8_product_work", autocast::float8_product_work);
  module.attr("float8_traffic_share") = autocast::kTrafficShare;
  module.def("float8_constants", constants);
  module.def("float8_plan_of_shapes", torch::wrap_pybind_function(plan_of_shapes));
}

}  // namespace fastamp::python
