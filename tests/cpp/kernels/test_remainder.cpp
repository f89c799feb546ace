// SPDX-License-Identifier: Apache-2.0
// Masters in two bytes, over every significand: what comes back is the master, and what is stored
// is the master rounded.

#include "kernels/functors/remainder.h"
#include "support/catch.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using namespace fastamp::kernels;

namespace {

/// What a master comes back as, and whether the parameter is still its rounding.
template <typename Half>
struct Stored {
  explicit Stored(float master) {
    const Half param(master);
    const float wide = static_cast<float>(param);
    const std::int32_t remainder = Remainder<Half>::of(master, wide);
    fits = remainder >= -32768 && remainder <= 32767;
    back = Remainder<Half>::master(wide, static_cast<std::int16_t>(remainder));
    same_param = Half(back).x == param.x;
    even = (param.x & 1U) == 0;
  }

  float back;
  bool fits;
  bool same_param;
  bool even;
};

struct Counts {
  std::uint64_t masters = 0;
  std::uint64_t wrong_params = 0;
  std::uint64_t changed = 0;
  double worst = 0.0;
};

/// Over all significands of a sign and exponent.
template <typename Half, typename Look>
Counts all_masters(std::uint32_t top, const Look& look) {
  Counts counts;
  for (std::uint32_t significand = 0; significand < 0x800000U; ++significand) {
    const float master = from_bits(top << 23U | significand);
    const Stored<Half> stored(master);
    ++counts.masters;
    counts.wrong_params += !stored.same_param || !stored.fits;
    if (bits_of(stored.back) != bits_of(master)) {
      ++counts.changed;
      const double error = std::abs(static_cast<double>(stored.back) - static_cast<double>(master));
      counts.worst = std::max(counts.worst, error);
      look(master, stored);
    }
  }
  return counts;
}

}  // namespace

TEST_CASE("remainder: bfloat16 brings every master back but the tie that has no code",
          "[kernels]") {
  // Around 1, of both signs, the smallest normals, subnormals, and the largest exponent but one.
  for (const std::uint32_t top : {127U, 0x17fU, 1U, 0U, 0x100U, 253U}) {
    bool only_ties = true;
    const auto counts = all_masters<c10::BFloat16>(top, [&](float master, const auto& stored) {
      const std::uint32_t bits = bits_of(master);
      only_ties = only_ties && stored.even && (bits & 0xffffU) == 0x8000U &&
                  bits_of(stored.back) == bits - 1;
    });
    CAPTURE(top);
    CHECK(counts.wrong_params == 0);
    CHECK(only_ties);
    CHECK(counts.changed == counts.masters / 131072);
  }
}

TEST_CASE("remainder: float16 brings every normal master back, ties included", "[kernels]") {
  // 2^-14, 1, -1 and 2^14; then 2^15, beyond whose largest the parameter is inf.
  for (const std::uint32_t top : {113U, 127U, 0x17fU, 141U}) {
    const auto counts = all_masters<c10::Half>(top, [](float, const auto&) {});
    CAPTURE(top);
    CHECK(counts.wrong_params == 0);
    CHECK(counts.changed == 0);
  }
  const auto counts = all_masters<c10::Half>(142U, [&](float master, const auto& stored) {
    REQUIRE(master >= 65520.0F);
    REQUIRE(stored.back == INFINITY);
  });
  CHECK(counts.wrong_params == 0);
}

TEST_CASE("remainder: float16 below its normal numbers, within 2^-40", "[kernels]") {
  double worst = 0.0;
  for (const std::uint32_t top : {112U, 0x170U, 108U, 104U, 103U, 102U, 101U, 90U, 0U}) {
    const auto counts = all_masters<c10::Half>(top, [](float, const auto&) {});
    CAPTURE(top);
    CHECK(counts.wrong_params == 0);
    worst = std::max(worst, counts.worst);
  }
  CHECK(worst <= std::ldexp(1.0, -40));
  CHECK(worst > 0.0);
}

TEMPLATE_TEST_CASE("remainder: inf, NaN and zeros are their own masters", "[kernels]",
                   c10::BFloat16, c10::Half) {
  for (const float value : {0.0F, -0.0F, INFINITY, -INFINITY}) {
    CHECK(Remainder<TestType>::of(value, value) == 0);
    CHECK(bits_of(Remainder<TestType>::master(value, 0)) == bits_of(value));
  }
  for (const std::uint32_t bits : {0x7fffffffU, 0xffc00000U, 0x7f800001U}) {
    const auto nan = static_cast<float>(TestType(from_bits(bits)));
    REQUIRE(std::isnan(nan));
    CHECK(Remainder<TestType>::of(from_bits(bits), nan) == 0);
    CHECK(std::isnan(Remainder<TestType>::master(nan, 0)));
  }
}

TEMPLATE_TEST_CASE("remainder: one that is not the parameter's is worth half a unit of it",
                   "[kernels]", c10::BFloat16, c10::Half) {
  const auto wide = [](std::uint32_t bits) {
    return static_cast<float>(TestType(static_cast<std::uint16_t>(bits), TestType::from_bits()));
  };
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float param = wide(bits);
    for (const std::int32_t remainder : {-32768, -32767, -1, 0, 1, 32767}) {
      const float master = Remainder<TestType>::master(param, remainder);
      if (!std::isfinite(param)) {
        REQUIRE(bits_of(master) == bits_of(param));
        continue;
      }
      REQUIRE(std::isfinite(master));
      // The unit on the side of the remainder: at a power of two that towards zero is half as
      // large.
      const float next = wide((bits & 0x7fffU) + 1);
      const double unit = static_cast<double>(std::isfinite(next) ? next : 2 * std::abs(param)) -
                          std::abs(static_cast<double>(param));
      const double gap = std::abs(static_cast<double>(master) - static_cast<double>(param));
      REQUIRE(gap <= unit / 2);
    }
  }
}
