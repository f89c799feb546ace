// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <torch/serialize.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::GradScalerState;

namespace {

// torch.save(scaler.state_dict(), file) of torch 2.11 on torch.amp.GradScaler("cpu",
// init_scale=1024.0) after an overflow and two clean steps, in base64.
constexpr std::string_view kTorchsState =
    "UEsDBAAACAgAAAAAAAAAAAAAAAAAAAAAAAAQABIAYXJjaGl2ZS9kYXRhLnBrbEZCDgBaWlpaWlpaWlpaWlpaWoACfX"
    "EAKFgFAAAAc2NhbGVxAUdAgAAAAAAAAFgNAAAAZ3Jvd3RoX2ZhY3RvcnECR0AAAAAAAAAAWA4AAABiYWNrb2ZmX2Zh"
    "Y3RvcnEDRz/gAAAAAAAAWA8AAABncm93dGhfaW50ZXJ2YWxxBE3QB1gPAAAAX2dyb3d0aF90cmFja2VycQVLAnUuUE"
    "sHCF3VTBaJAAAAiQAAAFBLAwQAAAgIAAAAAAAAAAAAAAAAAAAAAAAAFwAyAGFyY2hpdmUvLmZvcm1hdF92ZXJzaW9u"
    "RkIuAFpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWloxUEsHCLfv3IMBAAAAAQAAAF"
    "BLAwQAAAgIAAAAAAAAAAAAAAAAAAAAAAAAGgA3AGFyY2hpdmUvLnN0b3JhZ2VfYWxpZ25tZW50RkIzAFpaWlpaWlpa"
    "WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWjY0UEsHCD93cekCAAAAAgAAAFBLAwQAAA"
    "gIAAAAAAAAAAAAAAAAAAAAAAAAEQA/AGFyY2hpdmUvYnl0ZW9yZGVyRkI7AFpaWlpaWlpaWlpaWlpaWlpaWlpaWlpa"
    "WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpabGl0dGxlUEsHCIU94xkGAAAABgAAAFBLAwQAAAgIAA"
    "AAAAAAAAAAAAAAAAAAAAAADwA9AGFyY2hpdmUvdmVyc2lvbkZCOQBaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpa"
    "WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlozClBLBwjRnmdVAgAAAAIAAABQSwMEAAAICAAAAAAAAAAAAAAAAA"
    "AAAAAAAB4AMgBhcmNoaXZlLy5kYXRhL3NlcmlhbGl6YXRpb25faWRGQi4AWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpa"
    "WlpaWlpaWlpaWlpaWlpaWlpaWlpaWjAyOTA4NDY4Njc3NzYyOTIzMTA0MDAwNTIwODk5NDY3Njg2MjczMDhQSwcI2q"
    "FWOCgAAAAoAAAAUEsBAgAAAAAICAAAAAAAAF3VTBaJAAAAiQAAABAAAAAAAAAAAAAAAAAAAAAAAGFyY2hpdmUvZGF0"
    "YS5wa2xQSwECAAAAAAgIAAAAAAAAt+/cgwEAAAABAAAAFwAAAAAAAAAAAAAAAADZAAAAYXJjaGl2ZS8uZm9ybWF0X3"
    "ZlcnNpb25QSwECAAAAAAgIAAAAAAAAP3dx6QIAAAACAAAAGgAAAAAAAAAAAAAAAABRAQAAYXJjaGl2ZS8uc3RvcmFn"
    "ZV9hbGlnbm1lbnRQSwECAAAAAAgIAAAAAAAAhT3jGQYAAAAGAAAAEQAAAAAAAAAAAAAAAADSAQAAYXJjaGl2ZS9ieX"
    "Rlb3JkZXJQSwECAAAAAAgIAAAAAAAA0Z5nVQIAAAACAAAADwAAAAAAAAAAAAAAAABWAgAAYXJjaGl2ZS92ZXJzaW9u"
    "UEsBAgAAAAAICAAAAAAAANqhVjgoAAAAKAAAAB4AAAAAAAAAAAAAAAAA0gIAAGFyY2hpdmUvLmRhdGEvc2VyaWFsaX"
    "phdGlvbl9pZFBLBgYsAAAAAAAAAB4DLQAAAAAAAAAAAAYAAAAAAAAABgAAAAAAAACTAQAAAAAAAHgDAAAAAAAAUEsG"
    "BwAAAAALBQAAAAAAAAEAAABQSwUGAAAAAAYABgCTAQAAeAMAAAAA";

std::vector<char> decoded(std::string_view base64) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<char> bytes;
  std::uint32_t bits = 0;
  int count = 0;
  for (const char digit : base64.substr(0, base64.find('='))) {
    bits = bits << 6U | static_cast<std::uint32_t>(kDigits.find(digit));
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> static_cast<unsigned>(count) & 0xFFU));
    }
  }
  return bytes;
}

using Entries = std::vector<std::pair<std::string, c10::IValue>>;

c10::IValue dict_of(const Entries& entries) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : entries) {
    dict.insert(c10::IValue(key), value);
  }
  return dict;
}

/// torch's five entries, the one at `index` replaced by `value`, or left out.
Entries five(std::size_t index = 5, const std::optional<c10::IValue>& value = std::nullopt) {
  Entries entries{{"scale", 512.0},
                  {"growth_factor", 2.0},
                  {"backoff_factor", 0.5},
                  {"growth_interval", int64_t{2000}},
                  {"_growth_tracker", int64_t{2}}};
  if (value) {
    entries.at(index).second = *value;
  } else if (index < entries.size()) {
    entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(index));
  }
  return entries;
}

std::string refusal(const c10::IValue& state_dict) {
  return error_text<c10::ValueError>([&] { GradScalerState::from_python(state_dict); });
}

std::string refusal_with(const std::string& key, const c10::IValue& value) {
  auto entries = five();
  entries.emplace_back(key, value);
  return refusal(dict_of(entries));
}

void advance(GradScaler& scaler, float gradient) {
  auto parameter = parameter_with(gradient, 3);
  auto optimizer = sgd({parameter});
  scaler.step(optimizer);
  scaler.update();
}

}  // namespace

TEST_CASE("python_state: what torch.save wrote of torch's scaler goes on here", "[scaler]") {
  const auto state = GradScalerState::from_python(torch::pickle_load(decoded(kTorchsState)));
  REQUIRE(state.has_value());
  CHECK(state->scale == 512.0);
  CHECK(state->growth_factor == 2.0);
  CHECK(state->backoff_factor == 0.5);
  CHECK(state->growth_interval == 2000);
  CHECK(state->growth_tracker == 2);
  CHECK_FALSE(state->min_scale.has_value());
  CHECK_FALSE(state->hysteresis.has_value());
  CHECK(state->history.empty());
  GradScaler scaler(c10::kCPU);
  scaler.load_state(state);
  CHECK(scaler.get_scale() == 512.0);
  scaler.scale(at::ones({}));
  advance(scaler, 1.0F);
  CHECK(scaler.state()->growth_tracker == 3);
}

TEST_CASE("python_state: to_python and back, through the file format too, loses nothing",
          "[scaler]") {
  auto scaler = started(
      cpu_options().min_scale(2.0).max_scale(131072.0).hysteresis(2).fast_growth_interval(7));
  for (const float gradient : {1.0F, std::numeric_limits<float>::infinity(), 1.0F}) {
    advance(scaler, gradient);
  }
  auto state = *scaler.state();
  state.history[1].norm = std::numeric_limits<double>::quiet_NaN();
  state.overflow_report.gradients.at(0).shape = {3};  // The parameter itself is gone.
  const bool through_file = GENERATE(true, false);
  const auto dict = state.to_python();
  const auto back = GradScalerState::from_python(
      through_file ? torch::pickle_load(torch::pickle_save(dict)) : dict);
  REQUIRE(back.has_value());
  std::ostringstream before;
  std::ostringstream after;
  before << state << '\n' << state.history;
  after << *back << '\n' << back->history;
  CHECK(before.str() == after.str());
  CHECK(back->hysteresis_tracker == state.hysteresis_tracker);
  CHECK(back->fast_growth_interval == 7);
  CHECK(back->fast_growth_limit == std::numeric_limits<double>::infinity());
  CHECK(std::isnan(back->history.at(1).norm));
  CHECK(back->history.at(1).skipped);
  CHECK(back->overflow_report.gradients.at(0).shape == std::vector<int64_t>{3});
  CHECK(back->overflow_report.gradients.at(0).inf == 3);
}

TEST_CASE("python_state: the empty dict of a disabled scaler is no state", "[scaler]") {
  const auto state = GradScalerState::from_python(dict_of({}));
  CHECK_FALSE(state.has_value());
  GradScaler scaler(c10::kCPU);
  CHECK_THROWS_AS(scaler.load_state(state), c10::Error);
}

TEST_CASE("python_state: numbers may be ints, whole floats or tensors of one element", "[scaler]") {
  CHECK(GradScalerState::from_python(dict_of(five(0, int64_t{256})))->scale == 256.0);
  CHECK(GradScalerState::from_python(dict_of(five(0, at::full({}, 128.0))))->scale == 128.0);
  CHECK(GradScalerState::from_python(dict_of(five(3, 100.0)))->growth_interval == 100);
}

TEST_CASE("python_state: what is no state_dict is refused by entry", "[scaler]") {
  CHECK(refusal(c10::IValue(2.0)) ==
        "GradScalerState::from_python: expected the state_dict of a scaler to be a dict, got "
        "Double");
  CHECK(refusal(c10::IValue()).find("to be a dict, got None") != std::string::npos);
  for (std::size_t i = 0; i < 5; ++i) {
    const auto key = five()[i].first;
    CHECK(refusal(dict_of(five(i))) ==
          "GradScalerState::from_python: expected a dict with the "
          "entry \"" +
              key + "\", got one without it");
    CHECK(refusal(dict_of(five(i, c10::IValue("1")))) ==
          "GradScalerState::from_python: expected the entry \"" + key +
              "\" to be a number, got String");
    CHECK_FALSE(refusal(dict_of(five(i, at::ones({2})))).empty());
    CHECK_FALSE(refusal(dict_of(five(i, true))).empty());
  }
  const std::vector<std::pair<c10::IValue, std::string>> odd = {
      {c10::IValue(0.5), "to be an integer, got 0.5"},
      {c10::IValue(1e300), "to be an integer"},
      {c10::IValue(std::numeric_limits<double>::quiet_NaN()), "to be an integer"}};
  for (const auto& [value, part] : odd) {
    CHECK(refusal(dict_of(five(3, value))).find(part) != std::string::npos);
  }
}

TEST_CASE("python_state: a past that is none is refused", "[scaler]") {
  c10::impl::GenericList rows(c10::AnyType::get());
  rows.push_back(c10::IValue(c10::ivalue::Tuple::create({c10::IValue(int64_t{0})})));
  CHECK(refusal_with("history", 1.0).find("\"history\" to be a list") != std::string::npos);
  CHECK(refusal_with("history", rows).find("to be tuples of 5, got 1") != std::string::npos);
  CHECK(refusal_with("overflow_report", 1.0).find("to be a dict") != std::string::npos);
  CHECK(refusal_with("overflow_report", dict_of({{"step", int64_t{0}}, {"scale", 2.0}}))
            .find("\"gradients\"") != std::string::npos);
  c10::impl::GenericList gradients(c10::AnyType::get());
  gradients.push_back(dict_of({{"name", int64_t{1}}}));
  CHECK(refusal_with("overflow_report",
                     dict_of({{"step", int64_t{0}}, {"scale", 2.0}, {"gradients", gradients}}))
            .find("\"name\" to be a string, got Int") != std::string::npos);
  CHECK_FALSE(refusal_with("skipped_in_a_row", c10::IValue("2")).empty());
}
