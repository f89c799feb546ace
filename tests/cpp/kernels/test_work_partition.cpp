// SPDX-License-Identifier: Apache-2.0
// The cuts of the CPU kernels: every element in one share, shares in order, for any cuts.

#include "kernels/cpu/work_partition.h"
#include "support/catch.h"

#include <cstdint>
#include <random>
#include <vector>

using fastamp::kernels::cpu::WorkPartition;

namespace {

void check_cuts(const std::vector<std::int64_t>& numels, const std::vector<std::int64_t>& cuts) {
  const WorkPartition partition(numels);
  std::vector<std::int64_t> covered(numels.size(), 0);
  for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
    partition.visit(cuts[c], cuts[c + 1],
                    [&](std::size_t i, std::int64_t first, std::int64_t last) {
                      REQUIRE(first == covered.at(i));
                      REQUIRE(last > first);
                      REQUIRE((last % WorkPartition::kCutNumel == 0 || last == numels[i]));
                      covered[i] = last;
                    });
  }
  REQUIRE(covered == numels);
}

}  // namespace

TEST_CASE("work partition: one share is everything", "[kernels]") {
  const std::vector<std::int64_t> numels{0, 1, 63, 64, 65, 0, 100000, 0};
  check_cuts(numels, {0, WorkPartition(numels).length()});
}

TEST_CASE("work partition: a cut at every unit", "[kernels]") {
  const std::vector<std::int64_t> numels{5, 0, 200, 64, 1};
  std::vector<std::int64_t> cuts;
  for (std::int64_t at = 0; at <= WorkPartition(numels).length(); ++at) {
    cuts.push_back(at);
  }
  check_cuts(numels, cuts);
}

TEST_CASE("work partition: random lists and cuts", "[kernels]") {
  std::mt19937_64 random(7);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::int64_t> numels(random() % 50);
    for (auto& numel : numels) {
      numel = static_cast<std::int64_t>(random() % 5 == 0 ? random() % 100000 : random() % 200);
    }
    const auto length = WorkPartition(numels).length();
    std::vector<std::int64_t> cuts{0, length};
    for (std::uint64_t c = random() % 20; c > 0; --c) {
      cuts.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(length + 1)));
    }
    std::sort(cuts.begin(), cuts.end());
    check_cuts(numels, cuts);
  }
}

TEST_CASE("work partition: no tensors, no work", "[kernels]") {
  CHECK(WorkPartition({}).length() == 0);
}
