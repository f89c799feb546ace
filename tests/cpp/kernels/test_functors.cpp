// SPDX-License-Identifier: Apache-2.0
// Element arithmetic on its own: what counts as non-finite, and the scale rule on its edges.

#include "kernels/functors/scale_record.h"
#include "kernels/functors/unscale.h"
#include "kernels/functors/update_scale.h"
#include "support/catch.h"

#include <cmath>
#include <cstdint>
#include <limits>

using fastamp::kernels::is_non_finite;
using fastamp::kernels::NonFinite;
using fastamp::kernels::ScaleUpdate;
using fastamp::kernels::Unscale;
using fastamp::kernels::UpdateScale;

TEMPLATE_TEST_CASE("functors: inf and NaN alone are non-finite", "[kernels]", float, double) {
  using limits = std::numeric_limits<TestType>;
  for (const TestType finite : {TestType{0}, -TestType{0}, limits::max(), limits::lowest(),
                                limits::min(), limits::denorm_min(), TestType{1}}) {
    CHECK_FALSE(is_non_finite(finite));
  }
  for (const TestType bad : {limits::infinity(), -limits::infinity(), limits::quiet_NaN(),
                             -limits::quiet_NaN(), limits::signaling_NaN()}) {
    CHECK(is_non_finite(bad));
  }
}

TEST_CASE("functors: only an inverse scale of 1 leaves gradients unwritten", "[kernels]") {
  CHECK_FALSE(Unscale<float>{1.0F}.rewrites());
  CHECK(Unscale<float>{std::nextafter(1.0F, 2.0F)}.rewrites());
  CHECK(Unscale<float>{NAN}.rewrites());
  CHECK(Unscale<float>{0.5F}(3.0F) == 1.5F);
}

namespace {

struct State {
  float scale;
  std::int32_t tracker;
  std::int32_t hysteresis;
};

UpdateScale rule(std::int32_t hysteresis = 1) {
  return {2.0, 0.5, 3, hysteresis, false, false, 0.0F, 0.0F};
}

void step(const UpdateScale& apply, State& state, float found_inf) {
  apply(state.scale, state.tracker, &state.hysteresis, found_inf);
}

}  // namespace

TEST_CASE("functors: any flag but zero is an overflow", "[kernels]") {
  for (const float flag : {1.0F, 2.0F, -1.0F, 1e-45F, INFINITY, NAN}) {
    State state{8.0F, 2, 1};
    step(rule(), state, flag);
    CHECK(state.scale == 4.0F);
    CHECK(state.tracker == 0);
  }
  State state{8.0F, 1, 1};
  step(rule(), state, -0.0F);
  CHECK(state.scale == 8.0F);
  CHECK(state.tracker == 2);
}

TEST_CASE("functors: growth stops where the scale would be infinite", "[kernels]") {
  State state{std::ldexp(1.0F, 127), 2, 1};
  step(rule(), state, 0.0F);
  CHECK(state.scale == std::ldexp(1.0F, 127));
  CHECK(state.tracker == 0);
}

TEST_CASE("functors: hysteresis allows hysteresis - 1 overflows in a row", "[kernels]") {
  State state{64.0F, 2, 3};
  step(rule(3), state, 1.0F);
  CHECK(state.scale == 64.0F);
  CHECK(state.tracker == 0);
  step(rule(3), state, 1.0F);
  CHECK(state.scale == 64.0F);
  step(rule(3), state, 1.0F);
  CHECK(state.scale == 32.0F);
  step(rule(3), state, 1.0F);  // and every one directly after it
  CHECK(state.scale == 16.0F);
  CHECK(state.hysteresis == 0);
  step(rule(3), state, 0.0F);
  CHECK(state.hysteresis == 3);
  step(rule(3), state, 1.0F);
  CHECK(state.scale == 16.0F);
}

TEST_CASE("functors: the first fall of a collapse is where fast growth ends", "[kernels]") {
  auto fast = rule();
  fast.growth_interval = 100;
  fast.fast_growth_interval = 2;
  State state{64.0F, 0, 1};
  float limit = INFINITY;
  const auto advance = [&](float found_inf, int steps) {
    for (int i = 0; i < steps; ++i) {
      fast(state.scale, state.tracker, nullptr, found_inf, &limit);
    }
  };
  advance(0.0F, 4);  // No fall yet.
  CHECK(state.scale == 256.0F);
  CHECK(limit == INFINITY);
  advance(1.0F, 3);
  CHECK(state.scale == 32.0F);
  CHECK(limit == -128.0F);
  advance(0.0F, 1);  // A clean step does not end a collapse, a growth does.
  advance(1.0F, 1);
  CHECK(limit == -128.0F);
  advance(0.0F, 6);
  CHECK(state.scale == 128.0F);
  CHECK(limit == 128.0F);
  advance(0.0F, 99);
  CHECK(state.scale == 128.0F);
  advance(0.0F, 1);
  CHECK(state.scale == 256.0F);
  CHECK(limit == 128.0F);
  advance(1.0F, 1);
  CHECK(limit == -128.0F);
}

TEST_CASE("functors: a bounded fall sets the limit to the bound", "[kernels]") {
  auto fast = rule();
  fast.fast_growth_interval = 2;
  fast.has_min = true;
  fast.min_scale = 48.0F;
  State state{64.0F, 0, 1};
  float limit = INFINITY;
  fast(state.scale, state.tracker, nullptr, 1.0F, &limit);
  CHECK(state.scale == 48.0F);
  CHECK(limit == -48.0F);
}

TEST_CASE("functors: bounds hold after every step", "[kernels]") {
  UpdateScale bounded = rule();
  bounded.has_min = bounded.has_max = true;
  bounded.min_scale = 1.0F;
  bounded.max_scale = 12.0F;
  State state{1.5F, 0, 1};
  step(bounded, state, 1.0F);
  CHECK(state.scale == 1.0F);
  state = {8.0F, 2, 1};
  step(bounded, state, 0.0F);
  CHECK(state.scale == 12.0F);
  state = {100.0F, 0, 1};  // outside from the start
  step(bounded, state, 0.0F);
  CHECK(state.scale == 12.0F);
  state = {NAN, 0, 1};
  step(bounded, state, 0.0F);
  CHECK(std::isnan(state.scale));
}

TEST_CASE("functors: a growth tracker at its maximum wraps", "[kernels]") {
  State state{8.0F, std::numeric_limits<std::int32_t>::max(), 1};
  step(rule(), state, 0.0F);
  CHECK(state.tracker == std::numeric_limits<std::int32_t>::min());
  CHECK(state.scale == 8.0F);
}

TEST_CASE("functors: inf and NaN are counted apart", "[kernels]") {
  NonFinite count;
  for (const float value : {1.0F, INFINITY, -INFINITY, NAN, -NAN, 0.0F, -INFINITY}) {
    count.count(value, !std::isfinite(value));
  }
  count.count(1.0F, /*overflows=*/true);  // Counts as inf.
  CHECK(count.inf == 4);
  CHECK(count.nan == 2);
}

TEST_CASE("functors: history is a ring, whatever its counter holds", "[kernels]") {
  float rows[3][4] = {};
  std::int64_t count = -1;  // as if loaded from somewhere
  const double norm = 2.5;
  float scale = 8.0F;
  std::int32_t tracker = 2;
  float inv_scale = 0.0F;
  const float found_inf = 0.0F;
  const ScaleUpdate update{rule(),
                           &scale,
                           &tracker,
                           nullptr,
                           &found_inf,
                           &inv_scale,
                           {&rows[0][0], 3, &count, nullptr, &norm}};
  const auto row = static_cast<std::uint64_t>(count) % 3;
  update();
  CHECK(count == 0);
  CHECK(rows[row][0] == 8.0F);
  CHECK(rows[row][1] == 0.0F);
  CHECK(rows[row][2] == 2.5F);
  CHECK(rows[row][3] == 0.0F);
  CHECK(scale == 16.0F);
  CHECK(inv_scale == 0.0625F);
}
