// SPDX-License-Identifier: Apache-2.0
// norm_and_check_ and the outputs of unscale_and_check_ from C++: lists of mixed dtypes, refusals.

#include "support/catch.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <vector>

using fastamp::ops::norm_and_check_;
using fastamp::ops::unscale_and_check_;

namespace {

std::vector<at::Tensor> mixed_list() {
  std::vector<at::Tensor> grads;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const std::int64_t numel : {0, 1, 15, 16, 17, 2047, 2048, 2049, 5000}) {
      grads.push_back(at::randn({numel}, at::kDouble).mul_(100).to(dtype));
    }
    grads.push_back(at::randn({40, 70}).to(dtype).slice(1, 1, 69, 2));
    grads.push_back(at::randn({3, 50}).to(dtype).t());
  }
  return grads;
}

double sum_of_squares(const std::vector<at::Tensor>& grads, double factor) {
  double sum = 0.0;
  for (const auto& grad : grads) {
    sum += grad.to(at::kDouble).mul(factor).square().sum().item<double>();
  }
  return sum;
}

struct Outputs {
  at::Tensor found_inf = at::zeros({});
  at::Tensor sum = at::full({}, -1.0, at::kDouble);
  at::Tensor counts;
  at::Tensor clip_coef = at::full({}, -1.0F);
  at::Tensor total_norm = at::full({1}, -1.0F);

  explicit Outputs(std::size_t grads)
      : counts(at::full({static_cast<std::int64_t>(grads), 2}, 7, at::kLong)) {}
};

}  // namespace

TEST_CASE("norm: a list of every dtype, size and layout", "[ops]") {
  const auto grads = mixed_list();
  const auto inv_scale = at::full({}, 0.25F);
  Outputs out(grads.size());
  norm_and_check_(grads, inv_scale, out.found_inf, out.sum, out.counts, 10.0, out.clip_coef,
                  out.total_norm);
  const double expected = sum_of_squares(grads, 0.25);
  CHECK(out.found_inf.item<float>() == 0.0F);
  CHECK(out.sum.item<double>() == Approx(expected).epsilon(1e-12));
  const auto norm = static_cast<float>(std::sqrt(out.sum.item<double>()));
  CHECK(out.total_norm.item<float>() == norm);
  CHECK(out.clip_coef.item<float>() == 1.0F / (norm + 1e-6F) * 10.0F);
  CHECK(out.counts.eq(7).all().item<bool>());  // no overflow: what was there stays
  auto mine = grads;
  for (auto& grad : mine) {
    grad = grad.clone();
  }
  const auto sum = at::zeros({1}, at::kDouble);
  unscale_and_check_(mine, inv_scale, out.found_inf, sum);
  CHECK(sum.item<double>() == out.sum.item<double>());
}

TEST_CASE("norm: inf and NaN are counted by gradient", "[ops]") {
  for (const bool writes : {false, true}) {
    auto grads = mixed_list();
    Outputs out(grads.size());
    auto expected = at::zeros_like(out.counts);
    const auto spoil = [&](std::int64_t grad, std::int64_t from, std::int64_t to, float value) {
      grads[static_cast<std::size_t>(grad)].view(-1).slice(0, from, to).fill_(value);
      expected[grad][std::isnan(value) ? 1 : 0].add_(to - from);
    };
    spoil(5, 0, 2047, INFINITY);
    spoil(8, 2040, 2060, NAN);
    spoil(8, 4999, 5000, -INFINITY);
    spoil(19, 100, 103, -INFINITY);
    spoil(30, 4000, 5000, NAN);
    const auto inv_scale = at::ones({});
    if (writes) {
      unscale_and_check_(grads, inv_scale, out.found_inf, std::nullopt, out.counts);
    } else {
      norm_and_check_(grads, inv_scale, out.found_inf, out.sum, out.counts);
      CHECK_FALSE(std::isfinite(out.sum.item<double>()));
    }
    CHECK(out.found_inf.item<float>() == 1.0F);
    CHECK(at::equal(out.counts, expected));
  }
}

TEST_CASE("norm: a refused call changes nothing", "[ops]") {
  const std::vector<at::Tensor> grads{at::full({4}, INFINITY)};
  const auto one = at::ones({});
  Outputs out(1);
  const auto refused = [&](const std::optional<at::Tensor>& counts, std::optional<double> max_norm,
                           const std::optional<at::Tensor>& clip_coef) {
    norm_and_check_(grads, one, out.found_inf, out.sum, counts, max_norm, clip_coef);
  };
  CHECK_THROWS_AS(refused(at::zeros({2, 2}, at::kLong), {}, {}), c10::ValueError);
  CHECK_THROWS_AS(refused(at::zeros({1, 2}), {}, {}), c10::TypeError);
  CHECK_THROWS_AS(refused({}, 1.0, {}), c10::ValueError);
  CHECK_THROWS_AS(refused({}, {}, out.clip_coef), c10::ValueError);
  CHECK_THROWS_AS(norm_and_check_({at::Tensor()}, one, out.found_inf, out.sum), c10::ValueError);
  CHECK_THROWS_AS(norm_and_check_({at::ones({2}, at::kDouble)}, one, out.found_inf, out.sum),
                  c10::TypeError);
  CHECK_THROWS_AS(unscale_and_check_(grads, one, out.found_inf, at::zeros({})), c10::TypeError);
  CHECK(out.found_inf.item<float>() == 0.0F);
  CHECK(out.sum.item<double>() == -1.0);
  CHECK(out.clip_coef.item<float>() == -1.0F);
}
