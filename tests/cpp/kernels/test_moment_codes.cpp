// SPDX-License-Identifier: Apache-2.0
// Moments in 8 bits: every code comes back, means are exact, and no step gets long.

#include "kernels/functors/moment_codes.h"
#include "kernels/functors/narrow_moments.h"
#include "support/catch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

using namespace fastamp::kernels;

namespace {

/// A code written down again, in fp64 and powers.
template <typename Codes>
double value_of(std::uint32_t code, std::uint32_t scale) {
  const std::uint32_t magnitude = code & Codes::kTop;
  const int exponent = static_cast<int>(magnitude / 8 + scale) - 127;
  const double value = magnitude == 0 ? 0.0 : std::ldexp(1.0 + (magnitude % 8) / 8.0, exponent);
  return code > Codes::kTop ? -value : value;
}

template <typename Codes>
constexpr std::uint32_t kGreatestScale = 254U - (Codes::kExponents - 1U);

std::uint32_t magnitude_of(float value) { return bits_of(value) & 0x7fffffffU; }

}  // namespace

TEMPLATE_TEST_CASE("moment codes: all 256 come back at every scale", "[kernels]", FirstMomentCodes,
                   SecondMomentCodes) {
  for (std::uint32_t scale = 1; scale <= kGreatestScale<TestType>; ++scale) {
    for (std::uint32_t code = 0; code < 256; ++code) {
      const float value = TestType::decode(code, scale);
      REQUIRE(static_cast<double>(value) == value_of<TestType>(code, scale));
      REQUIRE(TestType::nearest(value, scale) == code);
      REQUIRE(TestType::stochastic(value, scale, 0) == code);
      REQUIRE(TestType::stochastic(value, scale, 0xfffffU) == code);
    }
    // The largest code is what the scale was chosen for; one bit more asks for the next scale.
    const float top = TestType::decode(TestType::kTop, scale);
    REQUIRE(TestType::scale(bits_of(top)) == scale);
    REQUIRE(TestType::scale(bits_of(top) + 1) == std::min(scale + 1, kGreatestScale<TestType>));
  }
}

TEMPLATE_TEST_CASE("moment codes: the scale is the least that reaches the maximum", "[kernels]",
                   FirstMomentCodes, SecondMomentCodes) {
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const std::uint32_t part : {0U, 1U, 0x6fffffU, 0x700000U, 0x700001U, 0x7fffffU}) {
      const std::uint32_t bits = exponent << 23U | part;
      const auto scale = TestType::scale(bits);
      const auto reach = [](std::uint32_t of) { return value_of<TestType>(TestType::kTop, of); };
      CAPTURE(exponent, part, scale);
      REQUIRE(scale >= 1);
      REQUIRE(scale <= kGreatestScale<TestType>);
      const auto value = static_cast<double>(from_bits(bits));
      REQUIRE((value <= reach(scale) || scale == kGreatestScale<TestType>));
      REQUIRE((scale == 1 || value > reach(scale - 1)));
      REQUIRE(TestType::nearest(from_bits(bits), scale) <= TestType::kTop);
      REQUIRE(TestType::stochastic(from_bits(bits), scale, 0xfffffU) <= TestType::kTop);
    }
  }
}

TEMPLATE_TEST_CASE("moment codes: the mean over all noise is the value, exactly", "[kernels]",
                   FirstMomentCodes, SecondMomentCodes) {
  // The bits of a float between two codes are evenly spaced, over an exponent's end as well.
  for (const std::uint32_t code : {1U, 7U, 8U, 0x3fU, TestType::kTop - 1}) {
    for (const std::uint32_t part : {0U, 1U, 2U, 0x80000U, 0x7ffffU, 0xabcdeU, 0xfffffU}) {
      const std::uint32_t scale = 77;
      const float value = from_bits(bits_of(TestType::decode(code, scale)) + part);
      std::uint64_t up = 0;
      bool neighbours = true;
      for (std::uint32_t noise = 0; noise < (1U << 20U); ++noise) {
        const auto drawn = TestType::stochastic(value, scale, noise);
        neighbours = neighbours && (drawn == code || drawn == code + 1);
        up += drawn - code;
      }
      CHECK(neighbours);
      CHECK(up == part);
    }
  }
}

TEST_CASE("moment codes: the nearest code, ties to even", "[kernels]") {
  constexpr std::uint32_t kScale = 100;
  for (std::uint32_t code = 1; code < FirstMomentCodes::kTop; ++code) {
    const float lower = FirstMomentCodes::decode(code, kScale);
    const float upper = FirstMomentCodes::decode(code + 1, kScale);
    const float middle = (lower + upper) / 2;
    const std::uint32_t even = code % 2 == 0 ? code : code + 1;
    CHECK(FirstMomentCodes::nearest(middle, kScale) == even);
    CHECK(FirstMomentCodes::nearest(std::nextafter(middle, 0.0F), kScale) == code);
    CHECK(FirstMomentCodes::nearest(std::nextafter(middle, INFINITY), kScale) == code + 1);
    CHECK(FirstMomentCodes::nearest(-middle, kScale) == (even | 0x80U));
  }
}

TEST_CASE("moment codes: below the smallest code m becomes 0, and v the smallest code",
          "[kernels]") {
  for (const std::uint32_t scale : {1U, 2U, 90U, 150U}) {
    const float first = FirstMomentCodes::decode(1, scale);
    const float second = SecondMomentCodes::decode(1, scale);
    for (const float part : {0.9999999F, 0.5F, 1e-3F, 0.0F}) {
      CHECK(FirstMomentCodes::nearest(first * part, scale) == 0);
      CHECK(FirstMomentCodes::nearest(-first * part, scale) == 0x80U);
      for (const std::uint32_t noise : {0U, 1U, 0xfffffU}) {
        CHECK(FirstMomentCodes::stochastic(first * part, scale, noise) == 0);
        CHECK(SecondMomentCodes::stochastic(second * part, scale, noise) ==
              (second * part > 0 ? 1U : 0U));
      }
    }
    CHECK(SecondMomentCodes::nearest(std::numeric_limits<float>::denorm_min(), scale) == 1);
  }
}

TEMPLATE_TEST_CASE("moment codes: inf and NaN make a group NaN", "[kernels]", FirstMomentCodes,
                   SecondMomentCodes) {
  for (const std::uint32_t bits : {0x7f800000U, 0x7f800001U, 0x7fc00000U, 0x7fffffffU}) {
    CHECK(TestType::scale(bits) == kNotFiniteScale);
  }
  CHECK(TestType::scale(0x7f7fffffU) != kNotFiniteScale);
  for (std::uint32_t code = 0; code < 256; ++code) {
    CHECK(std::isnan(TestType::decode(code, kNotFiniteScale)));
  }
  CHECK(TestType::nearest(1.0F, kNotFiniteScale) == 0);
}

namespace {

/// Of two lists of moments that share groups: the greatest |u8| / |u32|, u = m / (sqrt(v) + eps),
/// and the greatest |u8|.
struct Longest {
  double ratio = 0.0;
  double step = 0.0;
};

Longest longest_step(const std::vector<float>& first, const std::vector<float>& second,
                     std::size_t group, bool noisy_first, std::mt19937& random) {
  Longest most;
  for (std::size_t at = 0; at < first.size(); at += group) {
    std::uint32_t greatest[2] = {};
    for (std::size_t i = at; i < at + group; ++i) {
      greatest[0] = std::max(greatest[0], magnitude_of(first[i]));
      greatest[1] = std::max(greatest[1], magnitude_of(second[i]));
    }
    const auto scale1 = FirstMomentCodes::scale(greatest[0]);
    const auto scale2 = SecondMomentCodes::scale(greatest[1]);
    for (std::size_t i = at; i < at + group; ++i) {
      const auto noise = static_cast<std::uint32_t>(random());
      const auto code1 = noisy_first
                             ? FirstMomentCodes::stochastic(first[i], scale1, noise & 0xfffffU)
                             : FirstMomentCodes::nearest(first[i], scale1);
      const auto code2 = SecondMomentCodes::stochastic(second[i], scale2, noise >> 12U);
      const auto update = [](float m, float v) {
        return std::abs(static_cast<double>(m)) / (std::sqrt(static_cast<double>(v)) + 1e-8);
      };
      const double own =
          update(FirstMomentCodes::decode(code1, scale1), SecondMomentCodes::decode(code2, scale2));
      const double torchs = update(first[i], second[i]);
      most.ratio = std::max(most.ratio, torchs > 0 ? own / torchs : own > 0 ? INFINITY : 0.0);
      most.step = std::max(most.step, own);
    }
  }
  return most;
}

}  // namespace

TEST_CASE("moment codes: no step is more than 1.13 times that of float32", "[kernels]") {
  const double bound = 1.0625 * std::sqrt(1.125);
  CHECK(bound < 1.13);
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  double greatest = 0.0;
  for (const double sigma : {0.0, 0.5, 1.0, 1.5, 2.0, 8.0}) {
    for (const std::size_t group : {32UL, 64UL, 128UL}) {
      // Moments after steps of gradients whose scales are lognormal along a row, fall tenfold half
      // way, and are 0 but for one step of twenty in every third group.
      const std::size_t numel = 128UL * 30;
      std::vector<float> first(numel);
      std::vector<float> second(numel);
      for (std::size_t i = 0; i < numel; ++i) {
        const double spread = 1e-4 * std::exp(sigma * normal(random));
        for (int step = 0; step < 100; ++step) {
          const bool remainders = i / 128 % 3 == 1 && step % 20 != 0;
          const double size = spread * (step < 50 ? 1.0 : 0.1) * (remainders ? 0.0 : 1.0);
          const auto g = static_cast<float>(size * normal(random));
          first[i] += 0.1F * (g - first[i]);
          second[i] = 0.999F * second[i] + 0.001F * g * g;
        }
      }
      CAPTURE(sigma, group);
      const auto nearest = longest_step(first, second, group, false, random);
      CHECK(nearest.ratio <= bound);
      const auto noisy = longest_step(first, second, group, true, random);
      CHECK(noisy.ratio <= std::pow(1.125, 1.5));
      greatest = std::max(greatest, nearest.ratio);
    }
  }
  CHECK(greatest > 1.1);  // else the bound is not what is tested
}

TEST_CASE("moment codes: a first moment without gradients falls to 0", "[kernels]") {
  for (const float beta1 : {0.5F, 0.9F, 0.9375F}) {
    CHECK_FALSE(first_moments_need_noise(1.0F - beta1));
    for (std::uint32_t code = 2; code <= FirstMomentCodes::kTop; ++code) {
      const float value = FirstMomentCodes::decode(code, 100) * beta1;
      CHECK(FirstMomentCodes::nearest(value, 100) < code);
    }
  }
  CHECK(first_moments_need_noise(1.0F - 0.95F));
  const float stuck = FirstMomentCodes::decode(9, 100);
  CHECK(FirstMomentCodes::nearest(stuck * 0.95F, 100) == 9);  // which is why
}
