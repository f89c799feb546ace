// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <cstdint>
#include <limits>

using fastamp::GradScaler;
using fastamp::GradScalerOptions;
using fastamp::test::cpu_options;
using fastamp::test::error_text;
using fastamp::test::parameter_with;
using fastamp::test::sgd;
using fastamp::test::started;

namespace {

// Runs one iteration and returns the scale after it.
double advance(GradScaler& scaler, bool overflow) {
  auto parameter = parameter_with(overflow ? std::numeric_limits<float>::quiet_NaN() : 1.0F);
  auto optimizer = sgd({parameter});
  scaler.step(optimizer);
  scaler.update();
  return scaler.get_scale();
}

}  // namespace

TEST_CASE("options: the defaults are torch.amp's", "[scaler]") {
  const GradScalerOptions options;
  CHECK(options.device() == c10::kCUDA);
  CHECK(options.init_scale() == 65536.0);
  CHECK(options.growth_factor() == 2.0);
  CHECK(options.backoff_factor() == 0.5);
  CHECK(options.growth_interval() == 2000);
  CHECK(options.enabled());
  CHECK_FALSE(options.min_scale().has_value());
  CHECK_FALSE(options.max_scale().has_value());
  CHECK(options.hysteresis() == 1);
  CHECK_FALSE(options.fast_growth_interval().has_value());
}

TEST_CASE("options: torch's conditions hold when enabled, and only then", "[scaler]") {
  CHECK_THROWS_AS(GradScaler(cpu_options().growth_factor(1.0)), c10::Error);
  CHECK_THROWS_AS(GradScaler(cpu_options().backoff_factor(1.0)), c10::Error);
  CHECK_NOTHROW(GradScaler(cpu_options().growth_factor(1.0).enabled(false)));
  CHECK_NOTHROW(GradScaler(cpu_options().init_scale(-1.0)));
}

TEST_CASE("options: what torch lacks is checked strictly", "[scaler]") {
  CHECK_THROWS_AS(GradScaler(cpu_options().min_scale(0.0)), c10::ValueError);
  CHECK_THROWS_AS(GradScaler(cpu_options().max_scale(-1.0)), c10::ValueError);
  CHECK_THROWS_AS(GradScaler(cpu_options().min_scale(4.0).max_scale(2.0)), c10::ValueError);
  CHECK_THROWS_AS(GradScaler(cpu_options().hysteresis(0)), c10::ValueError);
  CHECK_THROWS_AS(GradScaler(cpu_options().max_scale(2.0)), c10::ValueError);
  CHECK_THROWS_AS(GradScaler(cpu_options().min_scale(std::numeric_limits<double>::quiet_NaN())),
                  c10::ValueError);
}

TEST_CASE("options: what is at a bound is within it", "[scaler]") {
  constexpr double kLargest = std::numeric_limits<float>::max();
  for (const double scale : {kLargest, -kLargest}) {
    CHECK(GradScaler(cpu_options().init_scale(scale)).get_scale() == scale);
  }
  CHECK_THROWS_AS(GradScaler(cpu_options().init_scale(2.0 * kLargest)), c10::ValueError);
  auto scaler = started(cpu_options().init_scale(8.0).min_scale(8.0).max_scale(8.0));
  CHECK(advance(scaler, true) == 8.0);
  scaler.update(8.0);
  CHECK(scaler.get_scale() == 8.0);
}

TEST_CASE("options: bounds hold at every update", "[scaler]") {
  auto scaler =
      started(cpu_options().init_scale(8.0).growth_interval(1).min_scale(4.0).max_scale(16.0));
  CHECK(advance(scaler, false) == 16.0);
  CHECK(advance(scaler, false) == 16.0);
  CHECK(advance(scaler, true) == 8.0);
  CHECK(advance(scaler, true) == 4.0);
  CHECK(advance(scaler, true) == 4.0);
  CHECK_THROWS_AS(scaler.update(2.0), c10::ValueError);
  CHECK_THROWS_AS(scaler.update(32.0), c10::ValueError);
  CHECK(scaler.get_scale() == 4.0);
}

TEST_CASE("options: hysteresis counts overflows in a row", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(8.0).hysteresis(2));
  CHECK(advance(scaler, true) == 8.0);
  CHECK(advance(scaler, true) == 4.0);
  CHECK(advance(scaler, true) == 2.0);
  CHECK(advance(scaler, false) == 2.0);
  CHECK(advance(scaler, true) == 2.0);
  CHECK(advance(scaler, true) == 1.0);
}

TEST_CASE("options: fast growth brings a scale back that fell several times", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(64.0).growth_interval(50).fast_growth_interval(2));
  for (const bool overflow : {true, true, true, false, false, false}) {
    advance(scaler, overflow);
  }
  CHECK(scaler.get_scale() == 16.0);
  const auto state = *scaler.state();
  CHECK(state.fast_growth_interval == 2);
  CHECK(state.fast_growth_limit == 32.0);
  auto resumed = started(cpu_options());
  resumed.load_state(state);
  for (GradScaler* each : {&scaler, &resumed}) {
    CHECK(advance(*each, false) == 32.0);
    for (int i = 0; i < 49; ++i) {
      CHECK(advance(*each, false) == 32.0);
    }
    CHECK(advance(*each, false) == 64.0);
  }
}

TEST_CASE("options: intervals and limits of fast growth out of range are refused", "[scaler]") {
  CHECK(error_text<c10::ValueError>([] {
          GradScaler(cpu_options().fast_growth_interval(0));
        }).find("GradScaler: expected 1 <= fast_growth_interval < 2^31, got 0") == 0);
  CHECK_THROWS_AS(GradScaler(cpu_options().fast_growth_interval(int64_t{1} << 31)),
                  c10::ValueError);
  auto scaler = started(cpu_options().init_scale(8.0));
  auto state = *scaler.state();
  state.scale = 2.0;
  state.fast_growth_interval = 0;
  CHECK_THROWS_AS(scaler.load_state(state), c10::ValueError);
  state.fast_growth_interval = 2;
  for (const double limit : {std::numeric_limits<double>::quiet_NaN(), 1e39, -1e300}) {
    state.fast_growth_limit = limit;
    CHECK_THROWS_AS(scaler.load_state(state), c10::ValueError);
  }
  CHECK(scaler.get_scale() == 8.0);
}

TEST_CASE("options: setters act at the next update", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(8.0));
  scaler.set_growth_factor(4.0);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(1);
  CHECK(scaler.get_growth_factor() == 4.0);
  CHECK(scaler.get_backoff_factor() == 0.25);
  CHECK(scaler.get_growth_interval() == 1);
  CHECK(advance(scaler, false) == 32.0);
  CHECK(advance(scaler, true) == 8.0);
}

TEST_CASE("options: the constructor, the setters and load_state refuse the same", "[scaler]") {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  auto scaler = started(cpu_options().init_scale(8.0));
  const auto before = scaler.state();
  auto state = *before;
  for (const double factor : {0.5, 1.0, kNaN}) {
    CHECK_THROWS_AS(GradScaler(cpu_options().growth_factor(factor)), c10::ValueError);
    CHECK(error_text<c10::ValueError>([&] {
            scaler.set_growth_factor(factor);
          }).find("set_growth_factor: expected growth_factor > 1.0, got ") == 0);
    state.growth_factor = factor;
    CHECK(error_text<c10::ValueError>([&] {
            scaler.load_state(state);
          }).find("load_state: expected growth_factor > 1.0, got ") == 0);
  }
  state = *before;
  for (const double factor : {1.0, 2.0, 3.0, kNaN}) {
    CHECK_THROWS_AS(GradScaler(cpu_options().backoff_factor(factor)), c10::ValueError);
    CHECK(error_text<c10::ValueError>([&] {
            scaler.set_backoff_factor(factor);
          }).find("set_backoff_factor: expected backoff_factor < 1.0, got ") == 0);
    state.backoff_factor = factor;
    CHECK_THROWS_AS(scaler.load_state(state), c10::ValueError);
  }
  state = *before;
  state.growth_interval = -1;
  CHECK_THROWS_AS(GradScaler(cpu_options().growth_interval(-1)), c10::ValueError);
  CHECK_THROWS_AS(scaler.set_growth_interval(-1), c10::ValueError);
  CHECK_THROWS_AS(scaler.load_state(state), c10::ValueError);
  CHECK_NOTHROW(GradScaler(cpu_options().growth_interval(0)));
  state = *before;
  for (const double scale : {kNaN, kInfinity, -kInfinity, 1e300}) {
    CHECK_THROWS_AS(GradScaler(cpu_options().init_scale(scale)), c10::ValueError);
    state.scale = scale;
    CHECK(error_text<c10::ValueError>([&] {
            scaler.load_state(state);
          }).find("load_state: expected scale to be finite in float32, got ") == 0);
  }
  CHECK(scaler.get_growth_factor() == before->growth_factor);
  CHECK(scaler.get_backoff_factor() == before->backoff_factor);
  CHECK(scaler.get_growth_interval() == before->growth_interval);
  CHECK(scaler.get_scale() == 8.0);
}

TEST_CASE("options: counts that do not fit are refused before anything is loaded", "[scaler]") {
  constexpr int64_t kTooMany = int64_t{1} << 31;
  auto scaler = started(cpu_options().init_scale(8.0).hysteresis(2));
  auto state = *scaler.state();
  state.scale = 2.0;
  for (const int64_t count : {int64_t{-1}, kTooMany}) {
    auto other = state;
    other.growth_tracker = count;
    CHECK(error_text<c10::ValueError>([&] {
            scaler.load_state(other);
          }).find("load_state: expected 0 <= growth_tracker < 2^31, got ") == 0);
    other = state;
    other.hysteresis_tracker = count;
    CHECK_THROWS_AS(scaler.load_state(other), c10::ValueError);
  }
  CHECK_THROWS_AS(GradScaler(cpu_options().hysteresis(kTooMany)), c10::ValueError);
  CHECK_THROWS_AS(GradScaler(cpu_options().history_size(-1)), c10::ValueError);
  CHECK_THROWS_AS(GradScaler(cpu_options().history_size(1 << 24)), c10::ValueError);
  CHECK(scaler.get_scale() == 8.0);
}

TEST_CASE("options: a disabled scaler's are not checked, as torch's are not", "[scaler]") {
  GradScaler scaler(cpu_options().enabled(false).growth_factor(0.5).growth_interval(-1));
  CHECK_NOTHROW(scaler.set_backoff_factor(2.0));
  CHECK(scaler.get_backoff_factor() == 2.0);
}

TEST_CASE("options: a device is enough to make a scaler", "[scaler]") {
  CHECK(GradScaler(c10::kCPU).is_enabled());
  CHECK(GradScaler(c10::Device(c10::kCPU)).get_scale() == 65536.0);
  auto scaler = GradScaler(c10::kCPU);
  scaler.scale(at::ones({}));
  CHECK_NOTHROW(scaler.update(at::ones({})));  // Its kind of device is the CPU.
}

TEST_CASE("options: device=cuda without a CUDA device warns and disables", "[scaler]") {
  struct Handler : c10::WarningHandler {
    int count = 0;
    void process(const c10::Warning& /*warning*/) override { ++count; }
  } handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  const GradScaler scaler;
  CHECK(scaler.is_enabled() == torch::cuda::is_available());
  CHECK(handler.count == (torch::cuda::is_available() ? 0 : 1));
}
