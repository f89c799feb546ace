// SPDX-License-Identifier: Apache-2.0
// Conversions of every instruction set against c10's, on every 16-bit pattern and on the floats
// where rounding turns.

#include "kernels/cpu/conversions.h"
#include "support/catch.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace fastamp::kernels::cpu;

template <typename scalar_t>
scalar_t from_bits(std::uint32_t bits) {
  return scalar_t(static_cast<std::uint16_t>(bits), scalar_t::from_bits());
}

/// All patterns and some, so that vector bodies and tails are both used.
template <typename Convert, typename scalar_t>
void check_widen() {
  std::vector<scalar_t> in;
  for (std::uint32_t bits = 0; bits < 65536 + 5; ++bits) {
    in.push_back(from_bits<scalar_t>(bits & 0xffffU));
  }
  std::vector<float> out(in.size());
  Convert::widen(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i) {
    const auto expected = static_cast<float>(in[i]);
    if (std::isnan(expected)) {
      REQUIRE(std::isnan(out[i]));
    } else {
      REQUIRE(std::memcmp(&expected, &out[i], sizeof(float)) == 0);
    }
  }
}

template <typename Convert, typename scalar_t>
void check_narrow() {
  std::vector<float> in{0.0F,
                        -0.0F,
                        INFINITY,
                        -INFINITY,
                        NAN,
                        -NAN,
                        65504.0F,
                        65519.9F,
                        65520.0F,
                        3.4e38F,
                        -3.4e38F,
                        1e-45F,
                        std::numeric_limits<float>::min()};
  std::uint32_t nan_bits = 0x7f800001;  // a NaN whose payload is lost by truncation
  in.emplace_back();
  std::memcpy(&in.back(), &nan_bits, sizeof(float));
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto exact = static_cast<float>(from_bits<scalar_t>(bits));
    if (std::isfinite(exact)) {
      const auto next = static_cast<float>(from_bits<scalar_t>(bits + 1));
      // On the value, halfway to the next (a tie), and one float to either side of the tie.
      const float tie = exact / 2 + next / 2;
      in.insert(in.end(),
                {exact, tie, std::nextafter(tie, -INFINITY), std::nextafter(tie, INFINITY)});
    }
  }
  std::mt19937 random(3);
  for (int i = 0; i < 100003; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(random());
    in.emplace_back();
    std::memcpy(&in.back(), &bits, sizeof(float));
  }
  std::vector<scalar_t> out(in.size());
  Convert::narrow(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i) {
    CAPTURE(in[i]);
    if (std::isnan(in[i])) {
      REQUIRE(std::isnan(static_cast<float>(out[i])));
    } else {
      REQUIRE(out[i].x == scalar_t(in[i]).x);
    }
  }
}

template <typename Convert>
void check_all() {
  check_widen<Convert, c10::Half>();
  check_widen<Convert, c10::BFloat16>();
  check_narrow<Convert, c10::Half>();
  check_narrow<Convert, c10::BFloat16>();
}

}  // namespace

TEST_CASE("convert: baseline rounds as c10 does", "[kernels]") { check_all<BaselineConvert>(); }

#ifdef FASTAMP_X86_TARGETS
TEST_CASE("convert: AVX2 rounds as c10 does", "[kernels]") {
  if (best_target() == Target::kBaseline) {
    WARN("this processor has no AVX2: not run");
    return;
  }
  check_all<Avx2Convert>();
}
#endif
