// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <c10/util/Exception.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

using fastamp::GradScaler;
using fastamp::GradScalerOptions;
using fastamp::GradScalerState;
using fastamp::StepRecord;
using fastamp::test::cpu_options;
using fastamp::test::parameter_with;
using fastamp::test::sgd;
using fastamp::test::started;

namespace {

void advance(GradScaler& scaler, bool overflow) {
  auto parameter = parameter_with(overflow ? std::numeric_limits<float>::infinity() : 1.0F);
  auto optimizer = sgd({parameter});
  scaler.step(optimizer);
  scaler.update();
}

void check_equal(const GradScaler& left, const GradScaler& right) {
  const auto a = left.state();
  const auto b = right.state();
  REQUIRE(a.has_value());
  REQUIRE(b.has_value());
  CHECK(a->scale == b->scale);
  CHECK(a->growth_factor == b->growth_factor);
  CHECK(a->backoff_factor == b->backoff_factor);
  CHECK(a->growth_interval == b->growth_interval);
  CHECK(a->growth_tracker == b->growth_tracker);
  CHECK(a->min_scale == b->min_scale);
  CHECK(a->max_scale == b->max_scale);
  CHECK(a->hysteresis == b->hysteresis);
  CHECK(a->hysteresis_tracker == b->hysteresis_tracker);
  CHECK(a->fast_growth_interval == b->fast_growth_interval);
  CHECK(a->fast_growth_limit == b->fast_growth_limit);
}

/// NaN equals NaN: norms may be unknown.
std::vector<std::vector<double>> rows_of(const std::vector<StepRecord>& history) {
  std::vector<std::vector<double>> rows;
  for (const auto& record : history) {
    rows.push_back({static_cast<double>(record.step), record.scale, record.skipped ? 1.0 : 0.0,
                    std::isnan(record.norm) ? -1.0 : record.norm,
                    static_cast<double>(record.growth_tracker)});
  }
  return rows;
}

/// The last rows are the same, and there are as many as there is room for.
void check_same_past(const GradScaler& original, const GradScaler& loaded, int64_t size) {
  auto expected = rows_of(original.history());
  const auto rows = rows_of(loaded.history());
  const auto steps = static_cast<int64_t>(expected.back()[0]) + 1;
  CHECK(static_cast<int64_t>(rows.size()) == std::min(size, steps - 2));
  for (std::size_t i = 1; i <= std::min(rows.size(), expected.size()); ++i) {
    CHECK(rows[rows.size() - i] == expected[expected.size() - i]);
  }
}

GradScaler used(const GradScalerOptions& options) {
  auto scaler = started(options);
  for (const bool overflow : {false, true, false, false}) {
    advance(scaler, overflow);
  }
  return scaler;
}

}  // namespace

TEST_CASE("state: another scaler continues identically", "[scaler]") {
  const bool loaded_started = GENERATE(false, true);
  const std::vector<GradScalerOptions> variants{
      cpu_options().growth_interval(3), cpu_options().growth_interval(3).hysteresis(2),
      cpu_options().growth_interval(3).min_scale(16384.0).max_scale(131072.0),
      cpu_options().growth_interval(3).fast_growth_interval(1)};
  const auto& options = variants[GENERATE(range<std::size_t>(0, 4))];
  auto original = used(options);
  GradScaler loaded(cpu_options());
  if (loaded_started) {
    loaded.scale(at::ones({}));
  }
  loaded.load_state(original.state());
  check_equal(original, loaded);
  loaded.scale(at::ones({}));
  for (const bool overflow : {true, true, false, false, false, true, true, true}) {
    advance(original, overflow);
    advance(loaded, overflow);
    check_equal(original, loaded);
  }
}

TEST_CASE("archive: torch::save and torch::load carry the state", "[scaler]") {
  auto original = used(cpu_options()
                           .growth_interval(3)
                           .min_scale(2.0)
                           .max_scale(131072.0)
                           .hysteresis(2)
                           .fast_growth_interval(2));
  std::stringstream stream;
  torch::save(original, stream);
  GradScaler loaded(cpu_options());
  torch::load(loaded, stream);
  check_equal(original, loaded);
}

TEST_CASE("archive: the past goes with the state", "[scaler]") {
  auto original = used(cpu_options().history_size(3));
  auto weight = parameter_with(1.0F);
  auto bad = parameter_with(std::numeric_limits<float>::quiet_NaN(), 5);
  auto other = parameter_with(std::numeric_limits<float>::quiet_NaN(), 4);
  auto optimizer = sgd({weight, bad, other});
  original.step(optimizer);
  original.update();
  std::stringstream stream;
  torch::save(original, stream);
  const auto size = GENERATE(int64_t{0}, 1, 2, 3, 5, 100);
  const bool loaded_started = GENERATE(false, true);
  CAPTURE(size, loaded_started);
  GradScaler loaded(cpu_options().history_size(size));
  if (loaded_started) {
    loaded.scale(at::ones({}));
  }
  torch::load(loaded, stream);
  CHECK(loaded.overflow_report().str() == original.overflow_report().str());
  CHECK(loaded.overflow_report().gradients.at(0).shape == std::vector<int64_t>{5});
  CHECK(loaded.overflow_report().gradients.at(0).index == 1);
  CHECK(loaded.overflow_report().gradients.at(0).nan == 5);
  CHECK(loaded.overflow_report().gradients.at(1).index == 2);
  CHECK(loaded.overflow_report().gradients.at(1).nan == 4);
  CHECK(loaded.overflow_report().gradients.at(1).inf == 0);
  loaded.scale(at::ones({}));
  for (const bool overflow : {false, false, true, false, true}) {
    check_same_past(original, loaded, size);
    advance(original, overflow);
    advance(loaded, overflow);
  }
}

TEST_CASE("archive: one without a past forgets it", "[scaler]") {
  auto scaler = used(cpu_options());
  REQUIRE(scaler.history().size() == 4);
  REQUIRE(scaler.overflow_report());
  scaler.load_state(GradScalerState());
  CHECK(scaler.history().empty());
  CHECK_FALSE(scaler.overflow_report());
}

TEST_CASE("archive: skips in a row are counted on", "[scaler]") {
  auto original = started(cpu_options().init_scale(1e30));
  for (int i = 0; i < 12; ++i) {
    advance(original, true);
  }
  GradScaler loaded(cpu_options());
  loaded.load_state(original.state());
  loaded.scale(at::ones({}));
  const fastamp::test::CapturedWarnings warnings;
  for (int i = 0; i < 7; ++i) {
    advance(loaded, true);
  }
  CHECK(warnings.texts().empty());
  advance(loaded, true);
  REQUIRE(warnings.texts().size() == 1);
  CHECK(warnings.texts()[0].find("20 steps in a row") != std::string::npos);
}

TEST_CASE("archive: entries bear torch's state_dict keys", "[scaler]") {
  auto original = used(cpu_options());
  std::stringstream stream;
  torch::save(original, stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  for (const auto* key :
       {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}) {
    c10::IValue value;
    CHECK(archive.try_read(key, value));
  }
  c10::IValue value;
  CHECK_FALSE(archive.try_read("hysteresis", value));
}

TEST_CASE("archive: foreign ones and those of disabled scalers are refused", "[scaler]") {
  auto scaler = used(cpu_options());
  const auto before = scaler.get_scale();
  std::stringstream foreign;
  torch::save(at::ones({2}), foreign);
  CHECK_THROWS_AS(torch::load(scaler, foreign), c10::Error);
  std::stringstream disabled;
  torch::save(GradScaler(cpu_options().enabled(false)), disabled);
  CHECK_THROWS_AS(torch::load(scaler, disabled), c10::Error);
  CHECK(scaler.get_scale() == before);
}

TEST_CASE("load_state: empty or impossible states change nothing", "[scaler]") {
  auto scaler = used(cpu_options());
  auto untouched = used(cpu_options());
  CHECK_THROWS_AS(scaler.load_state(std::nullopt), c10::Error);
  GradScalerState bad;
  bad.scale = 2.0;
  bad.hysteresis = 0;
  CHECK_THROWS_AS(scaler.load_state(bad), c10::ValueError);
  bad.hysteresis.reset();
  bad.skipped_in_a_row = -1;
  CHECK_THROWS_AS(scaler.load_state(bad), c10::ValueError);
  bad.skipped_in_a_row = 0;
  bad.history = {StepRecord{.step = 3}, StepRecord{.step = 5}};
  CHECK_THROWS_AS(scaler.load_state(bad), c10::ValueError);
  bad.history = {StepRecord{.step = -1}};
  CHECK_THROWS_AS(scaler.load_state(bad), c10::ValueError);
  check_equal(scaler, untouched);
}

TEST_CASE("load_state: a disabled scaler ignores it", "[scaler]") {
  GradScaler scaler(cpu_options().enabled(false));
  CHECK_NOTHROW(scaler.load_state(std::nullopt));
  CHECK_NOTHROW(scaler.load_state(GradScalerState()));
}
