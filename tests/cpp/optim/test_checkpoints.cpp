// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/ones.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
namespace actual = fastamp::optim;
namespace expected = torch::optim;

namespace {

template <typename Optimizer>
void train(Optimizer& optimizer, Params& params, int steps) {
  for (int step = 0; step < steps; ++step) {
    set_gradients({&params});
    optimizer.step();
  }
}

/// Saves `from` after some steps, loads it into `to`, and takes both on; the largest difference.
template <typename From, typename To>
double exchanged(From& from, Params& params, To& to, Params& copies, int steps) {
  train(from, params, steps);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::NoGradGuard no_grad;
    copies[i].copy_(params[i]);
  }
  transfer(from, to);
  double worst = 0.0;
  for (int step = 0; step < 10; ++step) {
    set_gradients({&params, &copies});
    from.step();
    to.step();
    worst = std::max(worst, difference(params, copies));
  }
  return worst;
}

}  // namespace

TEMPLATE_TEST_CASE("a checkpoint at any step continues identically", "[optim]",
                   (std::pair<actual::SGD, actual::SGDOptions>),
                   (std::pair<actual::Adam, actual::AdamOptions>),
                   (std::pair<actual::AdamW, actual::AdamWOptions>)) {
  using Optimizer = typename TestType::first_type;
  using Options = typename TestType::second_type;
  const auto dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16);
  const auto state_dtype = GENERATE(at::kFloat, at::kBFloat16);
  const int steps = GENERATE(0, 1, 7);
  Options options(0.01);
  options.weight_decay(0.1).maximize(true).state_dtype(state_dtype);
  if constexpr (std::is_same_v<Optimizer, actual::SGD>) {
    options.momentum(0.9).dampening(0.2);
  } else {
    options.amsgrad(true);
  }
  auto params = make_params(dtype);
  auto copies = copy_of(params);
  Optimizer original(two_groups(params, Options(options).lr(0.05)), options);
  Optimizer resumed(copies, Options(1.0));
  REQUIRE_THROWS_AS(transfer(original, resumed), c10::ValueError);  // One group, not two.
  Optimizer fitting(two_groups(copies, Options(1.0)), Options(1.0));
  CHECK(exchanged(original, params, fitting, copies, steps) == 0.0);
  CHECK(equal(params, copies));
}

TEST_CASE("checkpoints of torch::optim's are read, and fastamp's by torch::optim", "[optim]") {
  const int steps = GENERATE(0, 1, 9);
  auto params = make_params();
  auto copies = copy_of(params);
  SECTION("SGD, bit for bit") {
    actual::SGD mine(copies, actual::SGDOptions(1.0));
    expected::SGD torchs(params, expected::SGDOptions(0.1).momentum(0.9).dampening(0.3));
    CHECK(exchanged(torchs, params, mine, copies, steps) == 0.0);
    expected::SGD back(params, expected::SGDOptions(1.0));
    CHECK(exchanged(mine, copies, back, params, steps) == 0.0);
  }
  SECTION("Adam") {
    actual::Adam mine(copies, actual::AdamOptions(1.0));
    expected::Adam torchs(params, expected::AdamOptions(0.01).amsgrad(true).weight_decay(0.1));
    CHECK(exchanged(torchs, params, mine, copies, steps) <= 4.0);
    expected::Adam back(params, expected::AdamOptions(1.0));
    CHECK(exchanged(mine, copies, back, params, steps) <= 4.0);
  }
  SECTION("AdamW") {
    actual::AdamW mine(copies, actual::AdamWOptions(1.0));
    expected::AdamW torchs(params, expected::AdamWOptions(0.01).weight_decay(0.1));
    CHECK(exchanged(torchs, params, mine, copies, steps) <= 4.0);
    expected::AdamW back(params, expected::AdamWOptions(1.0));
    CHECK(exchanged(mine, copies, back, params, steps) <= 4.0);
  }
}

TEST_CASE("load: options come from the checkpoint, fastamp's stay where it has none", "[optim]") {
  auto params = make_params();
  expected::AdamW torchs(params, expected::AdamWOptions(0.25).betas({0.5, 0.6}).eps(0.1));
  actual::AdamW mine(params, actual::AdamWOptions(1.0).maximize(true).state_dtype(at::kBFloat16));
  train(torchs, params, 1);
  transfer(torchs, mine);
  const auto& options = static_cast<actual::AdamWOptions&>(mine.param_groups()[0].options());
  CHECK(options.lr() == 0.25);
  CHECK(options.betas() == std::make_tuple(0.5, 0.6));
  CHECK(options.eps() == 0.1);
  CHECK(options.maximize());
  const auto& state = static_cast<actual::AdamWParamState&>(*mine.state().begin()->second);
  CHECK(state.exp_avg().scalar_type() == at::kBFloat16);
  CHECK(state.steps().item<float>() == 1.0F);
}

TEST_CASE("load: what does not fit is refused and changes nothing", "[optim]") {
  auto params = make_params();
  actual::AdamW optimizer(params, actual::AdamWOptions(0.01));
  train(optimizer, params, 3);
  auto copies = copy_of(params);
  actual::AdamW twin(copies, actual::AdamWOptions(0.01));
  transfer(optimizer, twin);
  SECTION("no optimizer at all") {
    std::stringstream stream;
    torch::save(at::ones({2}), stream);
    CHECK_THROWS_AS(torch::load(optimizer, stream), c10::Error);
  }
  SECTION("another optimizer") {
    actual::SGD other(params, actual::SGDOptions(0.1).momentum(0.9));
    other.step();
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < params.size(); ++i) {
      params[i].copy_(copies[i]);
    }
    CHECK_THROWS_AS(transfer(other, optimizer), c10::Error);
  }
  SECTION("parameters of other shapes") {
    Params wrong;
    for (const auto& param : params) {
      wrong.push_back(at::randn({static_cast<std::int64_t>(param.numel()) + 1}));
      wrong.back().requires_grad_(true);
    }
    actual::AdamW other(wrong, actual::AdamWOptions(0.5));
    train(other, wrong, 3);
    CHECK_THROWS_AS(transfer(other, optimizer), c10::ValueError);
  }
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params, &copies});
    optimizer.step();
    twin.step();
  }
  CHECK(equal(params, copies));
}

TEST_CASE("load: state that the checkpoint lacks is dropped", "[optim]") {
  auto params = make_params();
  actual::SGD fresh(params, actual::SGDOptions(0.1).momentum(0.9));
  auto copies = copy_of(params);
  actual::SGD used(copies, actual::SGDOptions(0.1).momentum(0.9));
  train(used, copies, 2);
  transfer(fresh, used);
  CHECK(used.state().empty());
}
