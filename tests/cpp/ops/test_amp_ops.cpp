// SPDX-License-Identifier: Apache-2.0
// The typed entries on the CPU: parity with torch's own ops, mixed lists, refusals.

#include "support/catch.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <vector>

using fastamp::ops::unscale_and_check_;
using fastamp::ops::update_scale_;

namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kMostThreads = 1;  // libgomp is not instrumented: its barriers order nothing there.
#else
constexpr int kMostThreads = 3;
#endif

std::vector<at::Tensor> clones(const std::vector<at::Tensor>& list) {
  std::vector<at::Tensor> copies;
  for (const auto& t : list) {
    copies.push_back(t.clone());
  }
  return copies;
}

/// Runs torch's op, one dtype at a time as it wants them, and fastamp's on the whole list.
void check_parity(const std::vector<at::Tensor>& grads, double factor) {
  const auto inv_scale = at::full({}, factor, at::kFloat);
  auto torchs = clones(grads);
  const auto own = clones(grads);
  auto torchs_flag = at::zeros({});
  const auto own_flag = at::zeros({});
  for (auto& t : torchs) {
    std::vector<at::Tensor> one{t};
    at::_amp_foreach_non_finite_check_and_unscale_(one, torchs_flag, inv_scale);
  }
  unscale_and_check_(own, inv_scale, own_flag);
  for (const auto& t : torchs) {
    // torch looks at what it reads, fastamp's at what it writes, too.
    torchs_flag.logical_or_(t.isfinite().all().logical_not());
  }
  REQUIRE(at::equal(torchs_flag, own_flag));
  for (std::size_t i = 0; i < grads.size(); ++i) {
    REQUIRE(at::allclose(torchs[i], own[i], 0.0, 0.0, /*equal_nan=*/true));
  }
}

}  // namespace

TEST_CASE("unscale: a list of every dtype and size matches torch", "[ops]") {
  std::vector<at::Tensor> grads;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    for (const std::int64_t numel : {0, 1, 7, 8, 9, 15, 16, 17, 1023, 1024, 1025, 5000}) {
      grads.push_back(at::randn({numel}, at::kFloat).mul_(100).to(dtype));
    }
  }
  for (const double factor : {1.0, 0.5, 1.0 / 65536, 3.1, 70000.0}) {
    check_parity(grads, factor);
  }
}

TEST_CASE("unscale: inf and NaN are found at both ends of first and last tensor", "[ops]") {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (const std::size_t which : {std::size_t{0}, std::size_t{2}}) {
      for (const std::int64_t at : {0, -1}) {
        std::vector<at::Tensor> grads{at::ones({33}), at::ones({5}), at::ones({1025})};
        grads[which].index_fill_(0, at::tensor(at < 0 ? grads[which].numel() - 1 : at), bad);
        check_parity(grads, 0.25);
        const auto flag = at::zeros({});
        unscale_and_check_(grads, at::ones({}), flag);
        CHECK(flag.item<float>() == 1.0F);
      }
    }
  }
}

TEST_CASE("unscale: result and flag are the same for any number of threads", "[ops]") {
  std::vector<at::Tensor> grads;
  for (int i = 0; i < 7; ++i) {
    grads.push_back(at::randn({100001 + i}));
    grads.push_back(at::randn({50003 + i}).to(at::kBFloat16));
    grads.push_back(at::randn({i, 3}).t());
    grads.push_back(at::randn({40, 70}).slice(1, 1, 69, 2));
  }
  const auto threads = at::get_num_threads();
  const auto inv_scale = at::full({}, 1.0 / 3, at::kFloat);
  std::vector<std::vector<at::Tensor>> results;
  for (const int n : {1, 2, 3}) {
    at::set_num_threads(std::min(n, kMostThreads));
    for (const bool bad : {false, true}) {
      auto mine = clones(grads);
      if (bad) {
        mine.back().select(0, 39).select(0, 33).fill_(INFINITY);
      }
      const auto flag = at::zeros({});
      unscale_and_check_(mine, inv_scale, flag);
      CHECK(flag.item<float>() == (bad ? 1.0F : 0.0F));
      if (!bad) {
        results.push_back(mine);
      }
    }
  }
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    CHECK(at::equal(results[0][i], results[1][i]));
    CHECK(at::equal(results[0][i], results[2][i]));
  }
}

TEST_CASE("unscale: a refused call changes nothing", "[ops]") {
  const auto good = at::ones({4});
  const auto flag = at::zeros({});
  const auto half = at::full({}, 0.5F);
  CHECK_THROWS_AS(unscale_and_check_({good, at::ones({2}, at::kInt)}, half, flag), c10::TypeError);
  CHECK_THROWS_AS(unscale_and_check_({good, at::Tensor()}, half, flag), c10::ValueError);
  CHECK_THROWS_AS(unscale_and_check_({good, at::ones({1}).expand({3})}, half, flag),
                  c10::ValueError);
  CHECK_THROWS_AS(unscale_and_check_({good}, at::ones({2}), flag), c10::ValueError);
  CHECK_THROWS_AS(unscale_and_check_({good}, at::ones({}, at::kDouble), flag), c10::TypeError);
  CHECK(at::equal(good, at::ones({4})));
  CHECK(flag.item<float>() == 0.0F);
}

TEST_CASE("update_scale: a thousand random steps follow torch", "[ops]") {
  auto torchs_scale = at::full({}, 65536.0F);
  auto torchs_tracker = at::zeros({}, at::kInt);
  const auto own_scale = torchs_scale.clone();
  const auto own_tracker = torchs_tracker.clone();
  const auto flags = at::rand({1000}).lt(0.2).to(at::kFloat);
  for (std::int64_t i = 0; i < 1000; ++i) {
    const auto flag = flags[i];
    at::_amp_update_scale_(torchs_scale, torchs_tracker, flag, 1.7, 0.6, 3);
    update_scale_(own_scale, own_tracker, flag, 1.7, 0.6, 3);
    REQUIRE(at::equal(torchs_scale, own_scale));
    REQUIRE(at::equal(torchs_tracker, own_tracker));
  }
}
