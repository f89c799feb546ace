#include "helpers.h"
#include "support/catch.h"

#include <c10/util/Exception.h>
#include <torch/serialize.h>

#include <cstddef>
#include <limits>
#include <sstream>
#include <vector>

using fastamp::GradScaler;
using fastamp::GradScalerOptions;
using fastamp::GradScalerState;
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
      cpu_options().growth_interval(3).min_scale(16384.0).max_scale(131072.0)};
  const auto& options = variants[GENERATE(range<std::size_t>(0, 3))];
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
  auto original =
      used(cpu_options().growth_interval(3).min_scale(2.0).max_scale(131072.0).hysteresis(2));
  std::stringstream stream;
  torch::save(original, stream);
  GradScaler loaded(cpu_options());
  torch::load(loaded, stream);
  check_equal(original, loaded);
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
  check_equal(scaler, untouched);
}

TEST_CASE("load_state: a disabled scaler ignores it", "[scaler]") {
  GradScaler scaler(cpu_options().enabled(false));
  CHECK_NOTHROW(scaler.load_state(std::nullopt));
  CHECK_NOTHROW(scaler.load_state(GradScalerState()));
}
