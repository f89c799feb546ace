// SPDX-License-Identifier: Apache-2.0
// Sums of squares have the same bits whatever the instruction set, and those of the definition.

#include "kernels/cpu/squares.h"
#include "support/catch.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace fastamp::kernels::cpu;

/// The order of the additions, spelled out: sixteen sums, then halves of halves.
double expected_sum(const std::vector<float>& data) {
  std::array<double, 16> sums{};
  for (std::size_t i = 0; i < data.size(); ++i) {
    sums.at(i % 16) += static_cast<double>(data[i]) * static_cast<double>(data[i]);
  }
  std::array<double, 4> quarter{};
  for (std::size_t k = 0; k < 4; ++k) {
    quarter.at(k) = (sums.at(k) + sums.at(8 + k)) + (sums.at(4 + k) + sums.at(12 + k));
  }
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

template <typename Convert>
void check_sums() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0F, 1000.0F);
  for (std::int64_t n = 0; n < 70; ++n) {
    std::vector<float> data(static_cast<std::size_t>(n));
    for (auto& number : data) {
      number = normal(random);
    }
    const double sum = sum_squares<Convert>(data.data(), n);
    const double expected = expected_sum(data);
    CAPTURE(n, sum, expected);
    REQUIRE(std::memcmp(&sum, &expected, sizeof(sum)) == 0);
    data.resize(2 * data.size() + 16);  // What is asked for ahead may lie behind the end.
    const double ahead = sum_squares<Convert, float, true>(data.data(), n);
    REQUIRE(std::memcmp(&ahead, &expected, sizeof(ahead)) == 0);
  }
}

template <typename Convert>
void check_non_finite() {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (std::size_t place = 0; place < 37; ++place) {
      std::vector<float> data(37, 3e38F);  // Their squares are finite in fp64.
      REQUIRE(std::isfinite(sum_squares<Convert>(data.data(), 37)));
      data[place] = bad;
      REQUIRE_FALSE(std::isfinite(sum_squares<Convert>(data.data(), 37)));
    }
  }
}

}  // namespace

TEST_CASE("squares: the baseline adds in the order that is documented", "[kernels]") {
  check_sums<BaselineConvert>();
  check_non_finite<BaselineConvert>();
}

#ifdef FASTAMP_X86_TARGETS
TEST_CASE("squares: AVX2 gives the baseline's bits", "[kernels]") {
  if (best_target() == Target::kBaseline) {
    WARN("this processor has no AVX2");
    return;
  }
  check_sums<Avx2Convert>();
  check_non_finite<Avx2Convert>();
}
#endif
