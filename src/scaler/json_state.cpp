// SPDX-License-Identifier: Apache-2.0
// A scaler's state as JSON: one flat object of numbers, written and read without loss.

#include "scaler/json_object.h"
#include "scaler/option_checks.h"

#include <fastamp/scaler/grad_scaler.h>

#include <c10/util/Exception.h>

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

namespace fastamp {
namespace {

constexpr const char* kJsonFormat = "fastamp.GradScaler";
constexpr int64_t kJsonVersion = 1;

void check_json_state(const char* function, const GradScalerState& state) {
  scaler::ScaleRules rules{.growth_factor = state.growth_factor,
                           .backoff_factor = state.backoff_factor,
                           .growth_interval = state.growth_interval,
                           .hysteresis = state.hysteresis.value_or(1),
                           .min_scale = state.min_scale,
                           .max_scale = state.max_scale,
                           .fast_growth_interval = state.fast_growth_interval.value_or(0)};
  scaler::check_rules(function, rules);
  scaler::check_extras(function, rules, std::nullopt);
  scaler::check_counts(function, state);
}

/// The shortest text that is read as the same number, as Python's repr.
std::string json_number(double value) {
  std::array<char, 32> buffer{};
  const auto written = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  std::string text(buffer.data(), written.ptr);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

std::string json_number(int64_t value) { return std::to_string(value); }

template <typename T>
void append_json(std::string& text, const char* key, T value) {
  text += std::string(", \"") + key + "\": " + json_number(value);
}

template <typename T>
void append_json_if(std::string& text, const char* key, const std::optional<T>& value) {
  if (value) {
    append_json(text, key, *value);
  }
}

std::string json_head(bool enabled) {
  return std::string(R"({"format": ")") + kJsonFormat + R"(", "version": )" +
         json_number(kJsonVersion) + R"(, "enabled": )" + (enabled ? "true" : "false");
}

}  // namespace

std::string GradScalerState::to_json() const {
  check_json_state("to_json", *this);
  auto text = json_head(/*enabled=*/true);
  append_json(text, "scale", scale);
  append_json(text, "growth_factor", growth_factor);
  append_json(text, "backoff_factor", backoff_factor);
  append_json(text, "growth_interval", growth_interval);
  append_json(text, "growth_tracker", growth_tracker);
  append_json_if(text, "min_scale", min_scale);
  append_json_if(text, "max_scale", max_scale);
  append_json_if(text, "hysteresis", hysteresis);
  append_json_if(text, "hysteresis_tracker", hysteresis_tracker);
  append_json_if(text, "fast_growth_interval", fast_growth_interval);
  if (fast_growth_limit && std::isfinite(*fast_growth_limit)) {
    append_json(text, "fast_growth_limit", *fast_growth_limit);
  } else if (fast_growth_limit) {
    text += R"(, "fast_growth_limit": null)";
  }
  return text + '}';
}

std::optional<GradScalerState> GradScalerState::from_json(std::string_view text) {
  scaler::JsonObject entries(text);
  const auto format = entries.string("format");
  TORCH_CHECK_VALUE(format == kJsonFormat, "from_json: expected \"format\" to be \"", kJsonFormat,
                    "\", got \"", format, '"');
  const auto version = entries.integer("version");
  TORCH_CHECK_VALUE(version == kJsonVersion, "from_json: expected \"version\" to be ", kJsonVersion,
                    ", got ", version);
  if (!entries.boolean("enabled")) {
    entries.expect_empty();
    return std::nullopt;
  }
  GradScalerState state;
  state.scale = entries.number("scale");
  state.growth_factor = entries.number("growth_factor");
  state.backoff_factor = entries.number("backoff_factor");
  state.growth_interval = entries.integer("growth_interval");
  state.growth_tracker = entries.integer("growth_tracker");
  state.min_scale = entries.number_if("min_scale");
  state.max_scale = entries.number_if("max_scale");
  state.hysteresis = entries.integer_if("hysteresis");
  state.hysteresis_tracker = entries.integer_if("hysteresis_tracker");
  state.fast_growth_interval = entries.integer_if("fast_growth_interval");
  state.fast_growth_limit = entries.null("fast_growth_limit")
                                ? std::optional(std::numeric_limits<double>::infinity())
                                : entries.number_if("fast_growth_limit");
  entries.expect_empty();
  check_json_state("from_json", state);
  return state;
}

std::string GradScaler::to_json() const {
  expect_not_moved_from("to_json");
  const auto current = state();
  return current ? current->to_json() : json_head(/*enabled=*/false) + '}';
}

void GradScaler::load_json(std::string_view text) {
  expect_not_moved_from("load_json");
  load_state(GradScalerState::from_json(text));
}

}  // namespace fastamp
