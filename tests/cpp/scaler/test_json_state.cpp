// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <c10/util/Exception.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::GradScalerState;

namespace {

const std::string kText =
    R"({"format": "fastamp.GradScaler", "version": 1, "enabled": true, "scale": 512.0, )"
    R"("growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "growth_tracker": 7})";

std::string replaced(const std::string& from, const std::string& to) {
  auto text = kText;
  return text.replace(text.find(from), from.size(), to);
}

}  // namespace

TEST_CASE("json: the text of a scaler is the one that Python writes", "[scaler]") {
  auto scaler = started(cpu_options());
  scaler.load_json(kText);
  CHECK(scaler.get_scale() == 512.0);
  CHECK(scaler.to_json() == kText);
  CHECK(GradScaler(cpu_options().enabled(false)).to_json() ==
        R"({"format": "fastamp.GradScaler", "version": 1, "enabled": false})");
}

TEST_CASE("json: all numbers come back without loss", "[scaler]") {
  GradScalerState state;
  state.scale = 0.1F;
  state.growth_factor = 1.0 / 3.0 + 1.0;
  state.backoff_factor = 1e-300;
  state.growth_interval = 0;
  state.growth_tracker = 2147483647;
  state.min_scale = std::numeric_limits<double>::denorm_min();
  state.max_scale = 0.7;
  state.hysteresis = 3;
  state.hysteresis_tracker = 1;
  state.fast_growth_interval = 5;
  state.fast_growth_limit = GENERATE(std::numeric_limits<double>::infinity(), 0.3, -0.3, -0.0);
  const auto back = GradScalerState::from_json(state.to_json());
  REQUIRE(back.has_value());
  CHECK(back->scale == state.scale);
  CHECK(back->growth_factor == state.growth_factor);
  CHECK(back->backoff_factor == state.backoff_factor);
  CHECK(back->growth_interval == state.growth_interval);
  CHECK(back->growth_tracker == state.growth_tracker);
  CHECK(back->min_scale == state.min_scale);
  CHECK(back->max_scale == state.max_scale);
  CHECK(back->hysteresis == state.hysteresis);
  CHECK(back->hysteresis_tracker == state.hysteresis_tracker);
  CHECK(back->fast_growth_interval == state.fast_growth_interval);
  CHECK(back->fast_growth_limit == state.fast_growth_limit);
  CHECK(back->to_json() == state.to_json());
}

TEST_CASE("json: another text is refused and changes nothing", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(8.0));
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "JSON with '{' here, got the end of the text"},
      {kText + "x", "nothing after the object"},
      {replaced("\"version\": 1", "\"version\": 2"), "\"version\" to be 1, got 2"},
      {replaced(", \"growth_tracker\": 7", ""), "an object with \"growth_tracker\""},
      {replaced("512.0", "\"512\""), "\"scale\" to be a number, got a string"},
      {replaced("512.0", "NaN"), "a number, a string, true, false or null, got NaN"},
      {replaced("512.0", "1e39"), "scale to be finite in float32"},
      {replaced("\"scale\"", "\"scales\""), "an object with \"scale\""},
      {replaced("7}", "7, \"more\": 1}"), "no other key, got \"more\""},
  };
  for (const auto& [text, message] : cases) {
    const auto said = error_text<c10::ValueError>([&] { scaler.load_json(text); });
    CHECK(said.find("from_json: expected " + message) == 0);
  }
  CHECK(scaler.get_scale() == 8.0);
  CHECK_THROWS_AS(
      scaler.load_json(R"({"format": "fastamp.GradScaler", "version": 1, "enabled": false})"),
      c10::Error);
}
