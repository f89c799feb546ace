// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"

#include <fastamp/scaler/grad_scaler.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

namespace fastamp::python {
namespace {

/// Python's scalers take anything that is like a number.
double state_number(const py::dict& state, const char* key) {
  return py::cast<double>(py::float_(py::object(state[key])));
}

int64_t state_integer(const py::dict& state, const char* key) {
  return py::cast<int64_t>(py::int_(py::object(state[key])));
}

std::optional<double> state_number_if(const py::dict& state, const char* key) {
  return state.contains(key) ? std::optional(state_number(state, key)) : std::nullopt;
}

std::optional<int64_t> state_integer_if(const py::dict& state, const char* key) {
  return state.contains(key) ? std::optional(state_integer(state, key)) : std::nullopt;
}

template <typename T>
void put_state_if(const py::dict& dict, const char* key, const std::optional<T>& value) {
  if (value) {
    dict[key] = *value;
  }
}

/// @param state  What state_dict() returns; the past is left out.
std::string state_to_json(const py::dict& state) {
  GradScalerState numbers;
  numbers.scale = state_number(state, "scale");
  numbers.growth_factor = state_number(state, "growth_factor");
  numbers.backoff_factor = state_number(state, "backoff_factor");
  numbers.growth_interval = state_integer(state, "growth_interval");
  numbers.growth_tracker = state_integer(state, "_growth_tracker");
  numbers.min_scale = state_number_if(state, "min_scale");
  numbers.max_scale = state_number_if(state, "max_scale");
  numbers.hysteresis = state_integer_if(state, "hysteresis");
  numbers.hysteresis_tracker = state_integer_if(state, "_hysteresis_tracker");
  numbers.fast_growth_interval = state_integer_if(state, "fast_growth_interval");
  numbers.fast_growth_limit = state_number_if(state, "_fast_growth_limit");
  return numbers.to_json();
}

/// A dict for load_state_dict(); empty for the text of a disabled scaler.
py::dict state_from_json(const std::string& text) {
  py::dict state;
  const auto numbers = GradScalerState::from_json(text);
  if (numbers) {
    state["scale"] = numbers->scale;
    state["growth_factor"] = numbers->growth_factor;
    state["backoff_factor"] = numbers->backoff_factor;
    state["growth_interval"] = numbers->growth_interval;
    state["_growth_tracker"] = numbers->growth_tracker;
    put_state_if(state, "min_scale", numbers->min_scale);
    put_state_if(state, "max_scale", numbers->max_scale);
    put_state_if(state, "hysteresis", numbers->hysteresis);
    put_state_if(state, "_hysteresis_tracker", numbers->hysteresis_tracker);
    put_state_if(state, "fast_growth_interval", numbers->fast_growth_interval);
    put_state_if(state, "_fast_growth_limit", numbers->fast_growth_limit);
  }
  return state;
}

}  // namespace

void bind_scaler_json(py::module_& module) {
  using torch::wrap_pybind_function;
  module.def("scaler_to_json", wrap_pybind_function(state_to_json), py::arg("state"),
             "Returns the JSON text of an enabled scaler's state_dict().");
  module.def("disabled_scaler_to_json", wrap_pybind_function([] {
               return GradScaler(GradScalerOptions().enabled(false)).to_json();
             }),
             "Returns the JSON text of a disabled scaler.");
  module.def("scaler_from_json", wrap_pybind_function(state_from_json), py::arg("text"),
             "Returns the state_dict() that a JSON text tells of.");
}

}  // namespace fastamp::python
