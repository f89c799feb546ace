// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding: exact in the mean, and noise without a pattern.

#include "kernels/cpu/conversions.h"
#include "kernels/functors/noise.h"
#include "support/catch.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using namespace fastamp::kernels;

TEST_CASE("noise: the mean over all noise is the value, exactly", "[kernels]") {
  // Of both signs, subnormal, across a power of two, and just below the largest bfloat16.
  constexpr std::array<std::uint32_t, 7> kUpper = {0x3f80, 0xbf80, 0x0000, 0x0001,
                                                   0x007f, 0x42ff, 0x7f7e};
  for (const std::uint32_t upper : kUpper) {
    for (std::uint32_t lower = 0; lower < 0x10000; lower += lower < 64 ? 1 : 997) {
      const std::uint32_t bits = upper << 16U | lower;
      const float value = from_bits(bits);
      std::uint64_t up = 0;
      bool neighbours = true;
      for (std::uint32_t noise = 0; noise < 0x10000; ++noise) {
        const std::uint32_t rounded = round_stochastically(value, noise);
        neighbours = neighbours && (rounded == upper || rounded == upper + 1);
        up += rounded - upper;
      }
      CHECK(neighbours);
      // One unit up in `lower` of 2^16 cases: bits between neighbours are evenly spaced.
      CHECK(up == lower);
    }
  }
}

TEST_CASE("noise: what bfloat16 has stays, and a NaN stays one", "[kernels]") {
  for (const std::uint32_t noise : {0U, 1U, 0x7fffU, 0x8000U, 0xffffU}) {
    for (const float value : {0.0F, -0.0F, 1.0F, -2.5F, INFINITY, -INFINITY}) {
      CHECK(round_stochastically(value, noise) == bits_of(value) >> 16U);
    }
    for (const std::uint32_t nan : {0x7f800001U, 0x7fffffffU, 0xffffffffU, 0xff800001U}) {
      CHECK(round_stochastically(from_bits(nan), noise) == 0x7fc0U);
    }
  }
  // As with rounding to nearest, what lies beyond the largest finite one may become inf.
  CHECK(round_stochastically(std::numeric_limits<float>::max(), 0xffffU) == 0x7f80U);
  CHECK(round_stochastically(std::numeric_limits<float>::max(), 0U) == 0x7f7fU);
}

TEST_CASE("noise: a larger value never becomes a smaller one", "[kernels]") {
  std::uint32_t random = 1;
  for (int i = 0; i < 100000; ++i) {
    random = mix32(random + 1);
    const std::uint32_t bits = random & 0x7f7fffffU;
    const std::uint32_t more = bits + (mix32(random) & 0x1ffffU);
    const std::uint32_t noise = mix32(random + 7) & 0xffffU;
    if (more < 0x7f800000U) {
      CHECK(round_stochastically(from_bits(bits), noise) <=
            round_stochastically(from_bits(more), noise));
    }
  }
}

namespace {

/// Of the counts of 256 equally likely cases: normal with mean 0 and deviation 1, nearly.
double excess(const std::array<std::uint32_t, 256>& counts) {
  double total = 0.0;
  for (const auto count : counts) {
    total += count;
  }
  double chi2 = 0.0;
  for (const auto count : counts) {
    chi2 += std::pow(count - total / 256, 2.0) / (total / 256);
  }
  return (chi2 - 255.0) / std::sqrt(2.0 * 255.0);
}

}  // namespace

TEST_CASE("noise: even over elements, over steps, over parameters, and in pairs", "[kernels]") {
  constexpr unsigned kDraws = 1U << 18U;
  const auto draw = [](std::size_t parameter, unsigned step, unsigned element) {
    return Noise::at(static_cast<std::uint64_t>(noise_origin(parameter)),
                     static_cast<float>(step))(element);
  };
  const std::array<std::uint32_t (*)(unsigned), 3> walks = {
      [](unsigned i) { return Noise::at(0, 5.0F)(i); },
      [](unsigned i) { return Noise::at(0, static_cast<float>(i))(3); },
      [](unsigned i) { return Noise::at(static_cast<std::uint64_t>(noise_origin(i)), 5.0F)(3); },
  };
  for (const auto& walk : walks) {
    std::array<std::uint32_t, 256> high{};
    std::array<std::uint32_t, 256> low{};
    std::array<std::uint32_t, 256> pairs{};
    for (unsigned i = 0; i < kDraws; ++i) {
      const auto noise = walk(i);
      REQUIRE(noise < 0x10000);
      ++high.at(noise >> 8U);
      ++low.at(noise & 0xffU);
      ++pairs.at((noise >> 12U) << 4U | walk(i + 1) >> 12U);
    }
    CHECK(std::abs(excess(high)) < 4.5);
    CHECK(std::abs(excess(low)) < 4.5);
    CHECK(std::abs(excess(pairs)) < 4.5);
  }
  CHECK(draw(0, 0, 0) != draw(1, 0, 0));
}

TEST_CASE("noise: a shard has the noise of its elements in the whole", "[kernels]") {
  const auto whole = Noise::at(static_cast<std::uint64_t>(noise_origin(7)), 3.0F);
  for (const std::uint64_t first : {std::uint64_t{1}, std::uint64_t{1000}, std::uint64_t{1} << 32U,
                                    (std::uint64_t{1} << 32U) - 3}) {
    const auto origin = noise_origin(7, first);
    CHECK(origin >= 0);
    const auto shard = Noise::at(static_cast<std::uint64_t>(origin), 3.0F);
    for (std::uint32_t i = 0; i < 10; ++i) {
      CHECK(shard(i) == whole(static_cast<std::uint32_t>(first) + i));
    }
  }
  CHECK(noise_origin(~std::size_t{0}, ~std::uint64_t{0}) >= 0);
}

TEST_CASE("noise: a block is rounded as its elements are, wherever it begins", "[kernels]") {
  const Noise noise{0xfffffff0U};
  std::vector<float> values;
  for (std::uint32_t i = 0; i < 1000; ++i) {
    values.push_back(from_bits(mix32(i + 1)));  // NaNs among them
  }
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1037}, std::int64_t{1} << 33U}) {
    for (const std::int64_t n : {1, 7, 64, 1000}) {
      std::vector<c10::BFloat16> block(static_cast<std::size_t>(n));
      for (const std::size_t m : {std::size_t{0}, std::size_t{1}}) {
        cpu::narrow_noisily(values.data(), block.data(), n, noise, m, first);
        for (std::size_t i = 0; i < block.size(); ++i) {
          const auto index = static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(i);
          const auto drawn = m == 0 ? noise.bits(index) >> 16U : noise(index);
          REQUIRE(block[i].x == round_stochastically(values[i], drawn));
        }
      }
    }
  }
}

TEST_CASE("noise: an element has the same wherever it lies in memory", "[kernels]") {
  constexpr std::uint32_t kMatrices = 3;
  constexpr std::uint32_t kRows = 5;
  constexpr std::uint32_t kColumns = 7;
  constexpr ElementOrder kOrder{kRows, kColumns};
  constexpr std::uint64_t kFar =
      (std::uint64_t{1} << 33U) / (kRows * kColumns) * (kRows * kColumns);
  CHECK_FALSE(ElementOrder{}.turns());
  CHECK(ElementOrder::of_packed(kOrder.packed()).rows == kRows);
  CHECK(ElementOrder::of_packed(kOrder.packed()).columns == kColumns);
  for (const std::uint64_t before : {std::uint64_t{0}, kFar}) {
    std::uint64_t place = before;
    for (std::uint32_t matrix = 0; matrix < kMatrices; ++matrix) {
      for (std::uint32_t column = 0; column < kColumns; ++column) {
        for (std::uint32_t row = 0; row < kRows; ++row, ++place) {
          const std::uint64_t number =
              before + (static_cast<std::uint64_t>(matrix) * kRows + row) * kColumns + column;
          REQUIRE(kOrder.element_at(place) == static_cast<std::uint32_t>(number));
        }
      }
    }
  }
  // A matrix of 2^34 elements.
  constexpr ElementOrder kLarge{1U << 17U, 1U << 17U};
  CHECK(kLarge.element_at((std::uint64_t{3} << 17U) + 2) == (2U << 17U) + 3U);
  CHECK(kLarge.element_at((std::uint64_t{3} << 17U) + (1U << 16U)) == 3U);
  const Noise noise{77U};
  std::vector<float> values(1000, 1.001F);
  for (const std::int64_t place : {std::int64_t{0}, std::int64_t{33}, std::int64_t{105}}) {
    std::vector<c10::BFloat16> block(values.size());
    cpu::narrow_turned(values.data(), block.data(), 1000, noise, 1, place, kOrder);
    for (std::size_t i = 0; i < block.size(); ++i) {
      const auto index = kOrder.element_at(static_cast<std::uint64_t>(place) + i);
      REQUIRE(block[i].x == round_stochastically(values[i], noise(index)));
    }
  }
}

TEST_CASE("noise: a counter of steps never stands still", "[kernels]") {
  CHECK(next_count(0.0F) == 1.0F);
  CHECK(next_count(16777215.0F) == 16777216.0F);
  for (const std::uint32_t steps :
       {0U, 1U, 77U, kCountableSteps - 1, kCountableSteps, kCountableSteps + 1,
        3 * kCountableSteps / 2 + 1, 2 * kCountableSteps, 300000000U}) {
    const float count = count_of(steps);
    CHECK(steps_of(count) == steps);
    CHECK(next_count(count) == count_of(steps + 1));
    CHECK(Noise::at(0, count).start != Noise::at(0, next_count(count)).start);
  }
  CHECK(next_count(INFINITY) == INFINITY);
  CHECK(std::isfinite(count_of(~std::uint64_t{0})));
}
