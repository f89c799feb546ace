// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::update_scale_ leaves what the CPU kernel leaves.

#include "cuda_on_cpu/tensors.h"
#include "kernels/amp_args.h"
#include "support/catch.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <optional>
#include <random>

using namespace fastamp::test;
using fastamp::kernels::UpdateScaleArgs;

namespace {

struct Case {
  float scale;
  float flag;
  std::int64_t interval;
  bool hysteresis;
  bool bounded;
  bool extras;  ///< Inverse scale, history and a norm.
  bool precise_norm;
  bool replaced;                              ///< By new_scale.
  std::optional<float> limit = std::nullopt;  ///< Of fast growth.
};

std::vector<at::Tensor> run(const Case& c, bool emulated) {
  const std::optional<at::Tensor> none;
  const auto optional = [&](bool wanted, const at::Tensor& t) {
    return wanted ? std::optional<at::Tensor>(t) : none;
  };
  const auto scale = scalar(c.scale);
  const auto tracker = at::full({}, 2, at::kInt);
  const auto found = scalar(c.flag);
  const auto hysteresis = optional(c.hysteresis, at::full({}, 2, at::kInt));
  const auto inv = optional(c.extras, scalar(0.0F));
  const auto norm =
      optional(c.extras, c.precise_norm ? at::full({}, 3.25, at::kDouble) : scalar(3.0F));
  const auto history = optional(c.extras, at::zeros({4, 4}, at::kFloat));
  const auto count = optional(c.extras, at::full({}, 6, at::kLong));
  const auto replacement = optional(c.replaced, scalar(77.0F));
  const auto limit = optional(c.limit.has_value(), scalar(c.limit.value_or(0.0F)));
  const auto bound = [&](double value) {
    return c.bounded ? std::optional<double>(value) : std::nullopt;
  };
  const UpdateScaleArgs args{scale,      tracker,        found,   2.0,          0.5,
                             c.interval, hysteresis,     2,       bound(600.0), bound(1500.0),
                             inv,        norm,           history, count,        replacement,
                             limit,      c.limit ? 3 : 0};
  emulated ? fastamp::kernels::update_scale_cuda(args) : fastamp::kernels::update_scale_cpu(args);
  std::vector<at::Tensor> results = {scale, tracker};
  for (const auto& t : {hysteresis, inv, history, count, limit}) {
    if (t.has_value()) {
      results.push_back(*t);
    }
  }
  return results;
}

}  // namespace

TEST_CASE("emulated update_scale: every branch has the CPU kernel's bits", "[update_scale]") {
  const float scale = GENERATE(1024.0F, 3e38F, 1e-40F);
  const float flag = GENERATE(0.0F, 1.0F, 2.0F, NAN);
  const bool fast = GENERATE(true, false);
  for (unsigned bits = 0; bits < 32; ++bits) {
    const auto bit = [&](unsigned i) { return (bits >> i & 1U) != 0; };
    const Case c{scale, flag, fast ? 3 : 100, bit(0), bit(1), bit(2), bit(3), bit(4)};
    CAPTURE(bits);
    CHECK(same_bits(run(c, true), run(c, false)));
  }
}

TEST_CASE("emulated update_scale: fast growth has the CPU kernel's bits", "[update_scale]") {
  const float scale = GENERATE(1024.0F, 700.0F, 3e38F, 1e-40F, NAN);
  const float limit = GENERATE(INFINITY, 2048.0F, 1024.0F, -2048.0F, -1500.0F, 0.0F, -0.0F, NAN);
  for (const float flag : {0.0F, 1.0F}) {
    for (unsigned bits = 0; bits < 16; ++bits) {
      const auto bit = [&](unsigned i) { return (bits >> i & 1U) != 0; };
      const Case c{scale, flag, bit(3) ? 3 : 100, bit(0), bit(1), true, false, bit(2), limit};
      CAPTURE(flag, bits);
      CHECK(same_bits(run(c, true), run(c, false)));
    }
  }
}

TEST_CASE("emulated update_scale: a run of steps has the CPU kernel's bits", "[update_scale]") {
  std::mt19937 random(GENERATE(1U, 2U, 3U));
  std::vector<at::Tensor> sides;
  for (int side = 0; side < 2; ++side) {
    sides.push_back(scalar(1024.0F));
    sides.push_back(at::zeros({}, at::kInt));
    sides.push_back(scalar(std::numeric_limits<float>::infinity()));
  }
  const std::optional<at::Tensor> none;
  for (int step = 0; step < 300; ++step) {
    const auto found = scalar(random() % 6 == 0 ? 1.0F : 0.0F);
    for (std::size_t side = 0; side < 2; ++side) {
      const std::optional<at::Tensor> limit = sides[3 * side + 2];
      const UpdateScaleArgs args{sides[3 * side],
                                 sides[3 * side + 1],
                                 found,
                                 1.7,
                                 0.6,
                                 11,
                                 none,
                                 1,
                                 std::nullopt,
                                 std::nullopt,
                                 none,
                                 none,
                                 none,
                                 none,
                                 none,
                                 limit,
                                 2};
      side == 0 ? fastamp::kernels::update_scale_cuda(args)
                : fastamp::kernels::update_scale_cpu(args);
    }
    REQUIRE(same_bits({sides[0], sides[1], sides[2]}, {sides[3], sides[4], sides[5]}));
  }
}
