// SPDX-License-Identifier: Apache-2.0
// Element arithmetic of the fused steps on its own: what must not be read, and exact ends.

#include "kernels/functors/adam.h"
#include "kernels/functors/amp_step_values.h"
#include "kernels/functors/divide.h"
#include "kernels/functors/master.h"
#include "kernels/functors/norm.h"
#include "kernels/functors/sgd.h"
#include "support/catch.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

using namespace fastamp::kernels;

namespace {

constexpr LearningRate kHalfRate{0.5, nullptr, nullptr};

SgdConstants sgd_group(double momentum, double dampening = 0.0, double weight_decay = 0.0) {
  return {kHalfRate, momentum, dampening, weight_decay, false, false};
}

AdamConstants adam_group() { return {kHalfRate, 0.9, 0.999, 1e-8, 0.0, true, false, false}; }

}  // namespace

TEST_CASE("step: the first momentum does not read its buffer nor the dampening", "[kernels]") {
  float weight = 1.0F;
  float buffer = NAN;
  SgdUpdate::at(sgd_group(0.9, 0.5), 0.0F)(2.0F, weight, buffer);
  CHECK(buffer == 2.0F);
  CHECK(weight == 0.0F);
  SgdUpdate::at(sgd_group(0.5, 0.5), 1.0F)(2.0F, weight, buffer);
  CHECK(buffer == 2.0F);  // 0.5 * 2 + (1 - 0.5) * 2
  CHECK(weight == -1.0F);
}

TEST_CASE("step: without weight decay an infinite weight makes no NaN", "[kernels]") {
  float weight = INFINITY;
  SgdUpdate::at(sgd_group(0.0), 0.0F)(1.0F, weight);
  CHECK(weight == INFINITY);
}

TEST_CASE("step: any flag but zero skips, absent pointers change nothing", "[kernels]") {
  for (const float flag : {1.0F, 2.0F, -1.0F, 1e-45F, INFINITY, NAN}) {
    CHECK(AmpStepPointers{nullptr, nullptr, &flag, INFINITY, true}.read().skip);
  }
  const auto amp_step = AmpStepPointers{nullptr, nullptr, nullptr, INFINITY, true}.read();
  CHECK_FALSE(amp_step.skip);
  CHECK_FALSE(amp_step.rewrites());
  const float quarter = 0.25F;
  CHECK(AmpStepPointers{&quarter, nullptr, nullptr, INFINITY, true}.read()(8.0F) == 2.0F);
  CHECK(AmpStepPointers{nullptr, &quarter, nullptr, INFINITY, true}.read().rewrites());
}

TEST_CASE("step: a learning rate is read where a tensor is", "[kernels]") {
  const float single = 0.25F;
  const double precise = 0.125;
  CHECK(LearningRate{3.0, &single, nullptr}.value() == 0.25);
  CHECK(LearningRate{3.0, nullptr, &precise}.value() == 0.125);
  CHECK(LearningRate{3.0, nullptr, nullptr}.value() == 3.0);
}

TEST_CASE("step: Adam's first step is lr in the direction of the gradient", "[kernels]") {
  for (const float grad : {1.0F, -1.0F, 1e-3F, -1e3F}) {
    float weight = 1.0F;
    float first = 0.0F;
    float second = 0.0F;
    float unused = 0.0F;
    AdamUpdate::at(adam_group(), 0.0F)
        .step<AdamOrder::kCpu>({false, false, true}, grad, weight, first, second, unused);
    CHECK(weight == Approx(1.0 - std::copysign(0.5, grad)).margin(1e-4));
  }
}

TEST_CASE("step: amsgrad keeps the greatest second moment, and a NaN", "[kernels]") {
  float weight = 1.0F;
  float first = 0.0F;
  float second = 0.0F;
  float greatest = 7.0F;
  AdamUpdate::at(adam_group(), 3.0F)
      .step<AdamOrder::kCpu>({true, false, true}, 1.0F, weight, first, second, greatest);
  CHECK(greatest == 7.0F);
  greatest = 0.0F;
  AdamUpdate::at(adam_group(), 3.0F)
      .step<AdamOrder::kCpu>({true, false, true}, 1.0F, weight, first, second, greatest);
  CHECK(greatest == second);
  greatest = NAN;
  AdamUpdate::at(adam_group(), 3.0F)
      .step<AdamOrder::kCpu>({true, false, true}, 1.0F, weight, first, second, greatest);
  CHECK(std::isnan(greatest));
}

TEST_CASE("step: a master counts unless its parameter was written since", "[kernels]") {
  const float master = 1.0F + 0x1p-20F;
  CHECK(current_weight(master, 1.0F, 1.0F) == master);
  CHECK(current_weight(master, 1.0F, 0.5F) == 0.5F);
  CHECK(std::isnan(current_weight(master, 1.0F, NAN)));
  CHECK(std::isnan(current_weight(NAN, NAN, NAN)));
  CHECK(current_weight(NAN, NAN, 2.0F) == 2.0F);
}

TEST_CASE("step: a gradient is clamped last, and a NaN is not", "[kernels]") {
  const float half = 0.5F;
  const auto amp_step = AmpStepPointers{&half, &half, nullptr, 2.0F, true}.read();
  CHECK(amp_step(4.0F) == 1.0F);
  CHECK(amp_step(100.0F) == 2.0F);
  CHECK(amp_step(-100.0F) == -2.0F);
  CHECK(amp_step(-INFINITY) == -2.0F);
  CHECK(std::isnan(amp_step(NAN)));
  CHECK(AmpStepPointers{nullptr, nullptr, nullptr, 2.0F, true}.read().rewrites());
}

TEMPLATE_TEST_CASE_SIG("step: Adam's branches and its constants of 1 and -1 agree", "[kernels]",
                       ((AdamOrder kOrder), kOrder), AdamOrder::kCpu, AdamOrder::kCuda) {
  AdamConstants group = adam_group();
  group.weight_decay = 0.1;
  for (const double beta1 : {0.0, 0.3, 0.5, 0.9}) {
    for (const bool decoupled : {false, true}) {
      group.beta1 = beta1;
      group.decoupled = decoupled;
      float weight = 2.0F;
      float first = 0.75F;
      float second = 0.5F;
      float unused = 0.0F;
      const auto adam = AdamUpdate::at(group, 4.0F);
      CHECK(adam.modes.couples == !decoupled);
      CHECK(adam.modes.near == (beta1 > 0.5));
      adam.template step<kOrder>(adam.modes, 3.0F, weight, first, second, unused);
      const double decayed = decoupled ? 2.0 * (1 - 0.5 * 0.1) : 2.0;
      const double grad = decoupled ? 3.0 : 3.0 + 0.1 * 2.0;
      const double m = beta1 * 0.75 + (1 - beta1) * grad;
      const double v = 0.999 * 0.5 + 0.001 * grad * grad;
      const double root = std::sqrt(v) / std::sqrt(1 - std::pow(0.999, 5)) + 1e-8;
      CHECK(first == Approx(m).epsilon(1e-6));
      CHECK(second == Approx(v).epsilon(1e-6));
      CHECK(weight == Approx(decayed - 0.5 / (1 - std::pow(beta1, 5)) * m / root).epsilon(1e-5));
    }
  }
}

TEST_CASE("step: Adam groups products as torch's foreach kernels on CUDA do", "[kernels]") {
  const auto adam = AdamUpdate::at(adam_group(), 4.0F);
  int others = 0;
  for (int i = 1; i <= 1000; ++i) {
    const auto x = static_cast<float>(i);
    const float grad = std::sin(x);
    const float before[] = {std::cos(x), 0.1F * std::sin(3.0F * x), 0.01F / x};
    float weight = before[0];
    float first = before[1];
    float second = before[2];
    float unused = 0.0F;
    adam.step<AdamOrder::kCuda>(adam.modes, grad, weight, first, second, unused);
    // lerp, then input + alpha * op(a, b) in one rounding after that of op.
    const float m = std::fma(adam.lerp_weight, grad - before[1], before[1]);
    const float v = std::fma(adam.square_weight, grad * grad, before[2] * adam.beta2);
    const float denominator = std::sqrt(v) / adam.correction2_sqrt + adam.eps;
    const float w = std::fma(adam.minus_step_size, m / denominator, before[0]);
    CHECK(first == m);
    CHECK(second == v);
    CHECK(weight == w);
    float there[] = {before[0], before[1], before[2]};
    adam.step<AdamOrder::kCpu>(adam.modes, grad, there[0], there[1], there[2], unused);
    CHECK(there[0] == Approx(w).margin(1e-6));  // Both sums may cancel.
    others += there[0] != w || there[2] != v ? 1 : 0;
  }
  CHECK(others > 100);  // So the order is seen in the bits.
}

TEST_CASE("step: a division by the reciprocal is the division", "[kernels]") {
  const auto wrong = [](float divisor, std::uint32_t stride) {
    const float reciprocal = 1.0F / divisor;
    int count = 0;
    for (std::uint32_t bits = 0x3f800000U; bits < 0x40800000U; bits += stride) {  // [1, 4)
      const auto x = std::bit_cast<float>(bits);
      count += divide(x, divisor, reciprocal) == x / divisor ? 0 : 1;
    }
    return count;
  };
  // Below 1 lies the one mantissa whose reciprocal is no better than half an ulp.
  for (const std::uint32_t bits : {0x3f800000U, 0x3f7fffffU, 0x3f7ffffeU, 0x3d0180aeU}) {
    REQUIRE(wrong(std::bit_cast<float>(bits), 1) == 0);
  }
  for (const double beta : {0.9, 0.95, 0.98, 0.99, 0.999, 0.9999}) {
    for (int t = 1; t < 20000; t = 2 * t + 1) {  // Adam's corrections
      CAPTURE(beta, t);
      REQUIRE(wrong(static_cast<float>(std::sqrt(1.0 - std::pow(beta, t))), 97) == 0);
    }
  }
}

TEST_CASE("step: a division by the reciprocal at the ends of the range", "[kernels]") {
  using limits = std::numeric_limits<float>;
  const float tiniest = std::sqrt(limits::denorm_min());
  const float greatest = std::sqrt(limits::max());
  for (const float divisor : {1e-8F, 0.1F, 1.0F}) {
    for (const float x : {0.0F, tiniest, greatest, limits::infinity()}) {
      CHECK(divide(x, divisor, 1.0F / divisor) == x / divisor);
    }
    CHECK(std::isnan(divide(limits::quiet_NaN(), divisor, 1.0F / divisor)));
  }
  CHECK(divide(1.0F, 0.0F, limits::infinity()) == limits::infinity());
  CHECK(std::isnan(divide(0.0F, 0.0F, limits::infinity())));
}

TEST_CASE("norm: the clip coefficient is at most 1 and keeps a NaN", "[kernels]") {
  CHECK(clip_coefficient(1.0F, 0.5F) == 1.0F);
  CHECK(clip_coefficient(1.0F, 4.0F) == 1.0F / (4.0F + 1e-6F));
  CHECK(clip_coefficient(1.0F, INFINITY) == 0.0F);
  CHECK(std::isnan(clip_coefficient(1.0F, NAN)));
  CHECK(std::isnan(clip_coefficient(INFINITY, INFINITY)));  // as torch
}

TEST_CASE("norm: only what is asked for is written", "[kernels]") {
  double sum = -1.0;
  float norm = -1.0F;
  float clip = -1.0F;
  NormResults{nullptr, nullptr, nullptr, 0.0F}.write(4.0, 1.0F);
  NormResults{&sum, &norm, &clip, 1.0F}.write(16.0, 0.5F);
  CHECK(sum == 4.0);
  CHECK(norm == 2.0F);
  CHECK(clip == clip_coefficient(1.0F, 2.0F));
}

TEST_CASE("norm: squares of the greatest and least numbers are exact", "[kernels]") {
  using limits = std::numeric_limits<float>;
  for (const float value : {limits::max(), limits::lowest(), limits::min(), limits::denorm_min()}) {
    CHECK(std::sqrt(square(value)) == std::fabs(static_cast<double>(value)));
    CHECK_FALSE(is_non_finite(square(value) * 1e18));
  }
  CHECK(is_non_finite(square(INFINITY)));
  CHECK(is_non_finite(square(NAN)));
  CHECK(unscaled_sum_of_squares(16.0, 0.5F) == 4.0);
}
