// SPDX-License-Identifier: Apache-2.0
// The arithmetic of casts to fp8 against references of its own: scales by exact search, rounding
// against the nearest of all values of the format.

#include "kernels/functors/float8.h"
#include "support/catch.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

namespace {

using namespace fastamp::kernels;
using c10::Float8_e4m3fn;
using c10::Float8_e5m2;

template <typename scalar_t>
float value_of(std::uint32_t bits) {
  return static_cast<float>(scalar_t(static_cast<std::uint16_t>(bits), scalar_t::from_bits()));
}

/// All values of both 16-bit dtypes and those of float32 around the turns of a binade.
std::vector<float> all_values() {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    values.push_back(value_of<c10::BFloat16>(bits));
    values.push_back(value_of<c10::Half>(bits));
  }
  for (int exponent = -149; exponent < 128; ++exponent) {
    for (const float significand : {1.0F, 1.25F, 1.75F}) {
      const float value = std::ldexp(significand, exponent);
      values.insert(values.end(),
                    {value, std::nextafter(value, 0.0F), std::nextafter(value, INFINITY)});
    }
  }
  return values;
}

/// The greatest e with amax * 2^e <= max, at most 126.
int exponent_by_search(float amax, float max) {
  int exponent = 126;
  while (std::ldexp(static_cast<double>(amax), exponent) > static_cast<double>(max)) {
    --exponent;
  }
  return exponent;
}

template <typename Out>
void check_scales() {
  for (const float value : all_values()) {
    if (is_non_finite(value)) {
      continue;
    }
    const float amax = std::fabs(value);
    CAPTURE(amax);
    const float scale = float8_scale<Out>(magnitude_bits(amax));
    const int expected = amax == 0 ? 0 : exponent_by_search(amax, Float8Format<Out>::kMax);
    REQUIRE(scale == std::ldexp(1.0F, expected));
    REQUIRE(inverse_of_power_of_two(scale) == std::ldexp(1.0F, -expected));
  }
}

template <typename Out>
std::uint8_t bits_of_cast(float value, float scale = 1.0F) {
  return float8_of<Out>(value, scale).x;
}

/// The finite values of a format that are not negative, with their bits.
template <typename Out>
std::map<float, std::uint8_t> finite_values() {
  std::map<float, std::uint8_t> values;
  for (unsigned bits = 0; bits < 128; ++bits) {
    const auto value = static_cast<float>(Out(static_cast<std::uint8_t>(bits), Out::from_bits()));
    if (!is_non_finite(value)) {
      values.emplace(value, static_cast<std::uint8_t>(bits));
    }
  }
  return values;
}

template <typename Out>
void check_rounding() {
  const auto values = finite_values<Out>();
  REQUIRE(std::prev(values.end())->first == Float8Format<Out>::kMax);
  for (auto low = values.begin(), high = std::next(low); high != values.end(); ++low, ++high) {
    const float tie = (low->first + high->first) / 2;  // Exact: float32 has bits to spare.
    CAPTURE(low->first, tie);
    for (const int sign : {0x00, 0x80}) {
      const float one = sign == 0 ? 1.0F : -1.0F;
      const auto even = (low->second & 1U) == 0 ? low->second : high->second;
      REQUIRE(bits_of_cast<Out>(one * low->first) == (low->second | sign));
      REQUIRE(bits_of_cast<Out>(one * std::nextafter(tie, 0.0F)) == (low->second | sign));
      REQUIRE(bits_of_cast<Out>(one * tie) == (even | sign));
      REQUIRE(bits_of_cast<Out>(one * std::nextafter(tie, INFINITY)) == (high->second | sign));
    }
  }
}

template <typename Out>
bool is_right(float value, float scale) {
  if (is_non_finite(value)) {
    return is_non_finite(static_cast<float>(float8_of<Out>(value, scale)));
  }
  constexpr float kMax = Float8Format<Out>::kMax;
  const Out limited(std::fmax(-kMax, std::fmin(kMax, value * scale)));
  const auto pair = float8_pair_of_finite<Out>(value, 0.0F, scale);
  const auto other = float8_pair_of_finite<Out>(0.0F, value, scale);
  return bits_of_cast<Out>(value, scale) == limited.x &&
         float8_of_finite<Out>(value, scale).x == limited.x && pair == limited.x &&
         other == limited.x << 8U;
}

/// Every 16-bit value under the scales of 16 tensors: limited to the range and rounded.
template <typename Out>
void check_every_value() {
  for (int exponent = -60; exponent <= 60; exponent += 8) {
    const float scale = std::ldexp(1.0F, exponent);
    for (const float value : all_values()) {
      if (!is_right<Out>(value, scale)) {  // A REQUIRE for each would take seconds.
        CAPTURE(value, scale, static_cast<int>(bits_of_cast<Out>(value, scale)));
        FAIL();
      }
    }
  }
}

}  // namespace

TEST_CASE("float8: the scale brings the largest magnitude into the top binade", "[kernels]") {
  check_scales<Float8_e4m3fn>();
  check_scales<Float8_e5m2>();
}

TEST_CASE("float8: rounds to the nearest value, ties to even", "[kernels]") {
  check_rounding<Float8_e4m3fn>();
  check_rounding<Float8_e5m2>();
}

TEST_CASE("float8: every 16-bit value, limited to the range and rounded", "[kernels]") {
  check_every_value<Float8_e4m3fn>();
  check_every_value<Float8_e5m2>();
}

TEST_CASE("float8: magnitudes are those of all elements, whatever the order", "[kernels]") {
  const auto of = [](const std::vector<float>& values) {
    Float8Magnitudes seen{};
    for (const float value : values) {
      seen.include(value);
    }
    return seen;
  };
  CHECK(of({}).amax == 0);
  CHECK(of({0.5F, -3.0F, 2.0F}).amax == magnitude_bits(3.0F));
  CHECK(of({0.5F, -3.0F, 2.0F}).is_finite());
  for (const float value : {INFINITY, -INFINITY, NAN}) {
    CHECK(of({1.0F, value, 2.0F}).amax == magnitude_bits(2.0F));
    CHECK_FALSE(of({1.0F, value, 2.0F}).is_finite());
    Float8Magnitudes joined = of({4.0F, 1.0F});
    joined.include(of({value, 3.0F}));
    CHECK(joined.amax == magnitude_bits(4.0F));
    CHECK_FALSE(joined.is_finite());
  }
}

TEST_CASE("float8: inf and NaN never become finite", "[kernels]") {
  for (const float scale : {0x1p-120F, 1.0F, 0x1p126F}) {
    CHECK(bits_of_cast<Float8_e4m3fn>(INFINITY, scale) == 0x7f);
    CHECK(bits_of_cast<Float8_e4m3fn>(-INFINITY, scale) == 0xff);
    CHECK(bits_of_cast<Float8_e4m3fn>(NAN, scale) == 0x7f);
    CHECK(bits_of_cast<Float8_e5m2>(INFINITY, scale) == 0x7c);
    CHECK(bits_of_cast<Float8_e5m2>(-INFINITY, scale) == 0xfc);
    CHECK(bits_of_cast<Float8_e5m2>(-NAN, scale) == 0xff);
  }
}
