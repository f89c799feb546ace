// SPDX-License-Identifier: Apache-2.0
// Weight copies: casts of weights that an optimizer's step writes, so that the next region makes
// none.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <optional>
#include <sstream>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::kept_casts;
using fastamp::optim::Adam;
using fastamp::optim::AdamOptions;
using fastamp::optim::AdamW;
using fastamp::optim::AdamWOptions;
using fastamp::optim::AmpStep;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;

namespace {

constexpr auto kNone = c10::ScalarType::Undefined;

at::Tensor make_weight() {
  // No view: regions keep no casts of views.
  return at::arange(12, at::kFloat).reshape({4, 3}).div(8).requires_grad_(true);
}

at::Tensor product(const at::Tensor& weight) {
  const fastamp::AutocastGuard region(c10::kCPU, c10::kBFloat16);
  return at::mm(at::ones({2, 4}), weight);
}

fastamp::CastCounts casts_of_a_region(const at::Tensor& weight) {
  const fastamp::Trace trace;
  product(weight);
  return trace.totals();
}

/// Trains a weight; every third step is skipped on the device.
template <typename Optimizer>
std::vector<at::Tensor> train(Optimizer& optimizer, const at::Tensor& weight) {
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 7; ++step) {
    const auto out = product(weight);
    out.square().sum().backward();
    seen.push_back(out.detach());
    seen.push_back(weight.grad().clone());
    AmpStep amp_step;
    amp_step.found_inf = at::full({}, step % 3 == 2 ? 1.0 : 0.0);
    optimizer.set_amp_step(amp_step);
    optimizer.step();
    optimizer.zero_grad();
  }
  seen.push_back(weight.detach());
  return seen;
}

template <typename Optimizer, typename Options>
void check_twins(const Options& options) {
  const auto weight = make_weight();
  const auto other = make_weight();
  std::optional<Optimizer> copying(std::in_place, Params{weight},
                                   Options(options).autocast_dtype(at::kBFloat16));
  Optimizer plain(Params{other}, options);
  const auto own = train(*copying, weight);
  const auto torchs = train(plain, other);
  for (std::size_t i = 0; i < own.size(); ++i) {
    REQUIRE(own[i].equal(torchs[i]));
  }
  const auto casts = casts_of_a_region(weight);
  CHECK(casts.weight_casts == 0);
  CHECK(casts.kept_hits == 1);
  CHECK(kept_casts().bytes == 4 * 3 * 2);
  CHECK(casts_of_a_region(other).weight_casts == 1);
  copying.reset();
  CHECK(kept_casts().copies == 0);
}

}  // namespace

TEST_CASE("weight copies: the bits of training without, and no cast", "[optim]") {
  check_twins<SGD>(SGDOptions(0.01));
  check_twins<SGD>(SGDOptions(0.01).momentum(0.9).weight_decay(0.1));
  check_twins<Adam>(AdamOptions(0.01).amsgrad(true));
  check_twins<AdamW>(AdamWOptions(0.01).state_dtype(at::kBFloat16));
}

TEST_CASE("weight copies: in fp8, and in the base dtype where fp8 does not run", "[optim]") {
  const auto train_in_float8 = [](c10::ScalarType copies, std::int64_t outputs) {
    const auto weight = (at::arange(32 * outputs, at::kFloat).reshape({32, outputs}) - 100)
                            .div(512)
                            .requires_grad_(true);
    AdamW optimizer(Params{weight}, AdamWOptions(0.05).autocast_dtype(copies));
    std::vector<at::Tensor> seen;
    fastamp::CastCounts casts;
    for (int step = 0; step < 6; ++step) {
      // bf16: a float32 leaf would count as a weight in the base dtype.
      const auto x = at::ones({3, 32}, at::kBFloat16).requires_grad_(true);
      const fastamp::Trace trace;
      at::Tensor out;
      {
        const fastamp::AutocastGuard region(c10::kCPU, fastamp::Float8Recipe());
        out = at::mm(x, weight);
      }
      casts = trace.totals();
      out.square().sum().backward();
      seen.insert(seen.end(), {out.detach(), x.grad(), weight.grad().clone()});
      AmpStep amp_step;
      amp_step.found_inf = at::full({}, step % 3 == 2 ? 1.0 : 0.0);
      optimizer.set_amp_step(amp_step);
      optimizer.step();
      optimizer.zero_grad();
    }
    CHECK(casts.weight_casts == (copies == kNone ? 1 : 0));
    seen.push_back(weight.detach());
    return seen;
  };
  for (const std::int64_t outputs : {48, 20}) {
    const auto own = train_in_float8(at::kFloat8_e4m3fn, outputs);
    const auto torchs = train_in_float8(kNone, outputs);
    for (std::size_t i = 0; i < own.size(); ++i) {
      REQUIRE(own[i].equal(torchs[i]));
    }
  }
}

TEST_CASE("weight copies: weights that others write are cast again", "[optim]") {
  const auto weight = make_weight();
  SGD optimizer(Params{weight}, SGDOptions(0.01).autocast_dtype(at::kBFloat16));
  train(optimizer, weight);
  {
    const at::NoGradGuard no_grad;
    weight.fill_(2);
  }
  CHECK(product(weight).eq(8).all().item<bool>());
  weight.mutable_grad() = at::ones({4, 3});
  {
    const at::NoGradGuard no_grad;
    weight.fill_(1.01);
  }
  optimizer.step();  // The weight copy was out of date: cast before, written by the step.
  CHECK(casts_of_a_region(weight).kept_hits == 1);
  CHECK(product(weight).eq(4).all().item<bool>());
  fastamp::drop_kept_casts();
  CHECK(product(weight).eq(4).all().item<bool>());
}

TEST_CASE("weight copies: no part of archives, and loading leaves the option", "[optim]") {
  const auto weight = make_weight();
  const auto other = make_weight();
  SGD copying(Params{weight}, SGDOptions(0.01).momentum(0.9).autocast_dtype(at::kBFloat16));
  SGD plain(Params{other}, SGDOptions(0.01).momentum(0.9));
  train(copying, weight);
  train(plain, other);
  std::stringstream saved;
  torch::save(copying, saved);
  torch::load(plain, saved);
  CHECK(static_cast<SGDOptions&>(plain.defaults()).autocast_dtype() == kNone);
  std::stringstream again;
  torch::save(plain, again);
  torch::load(copying, again);
  CHECK(static_cast<SGDOptions&>(copying.param_groups()[0].options()).autocast_dtype() ==
        at::kBFloat16);
}

TEST_CASE("weight copies: other dtypes are refused", "[optim]") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kInt, at::kFloat8_e5m2}) {
    CHECK_THROWS_AS(SGD(Params{make_weight()}, SGDOptions(1.0).autocast_dtype(dtype)), c10::Error);
    CHECK_THROWS_AS(Adam(Params{make_weight()}, AdamOptions().autocast_dtype(dtype)), c10::Error);
    CHECK_THROWS_AS(AdamW(Params{make_weight()}, AdamWOptions().autocast_dtype(dtype)), c10::Error);
  }
}
