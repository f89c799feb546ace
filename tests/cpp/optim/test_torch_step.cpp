// SPDX-License-Identifier: Apache-2.0
// Parameters that there is no kernel for are stepped by LibTorch's code in the same call.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/grad_scaler.h>

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <utility>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
namespace actual = fastamp::optim;
namespace expected = torch::optim;
using fastamp::optim::AmpStep;

namespace {

using Sgd = std::pair<actual::SGD, expected::SGD>;
using Adam = std::pair<actual::Adam, expected::Adam>;
using AdamW = std::pair<actual::AdamW, expected::AdamW>;

/// float32 and float64, in turns.
Params mixed_params() {
  Params params;
  for (int i = 0; i < 4; ++i) {
    const auto dtype = i % 2 == 0 ? at::kFloat : at::kDouble;
    params.push_back(at::randn({5, 3}, dtype).requires_grad_(true));
  }
  return params;
}

Params doubles_of(const Params& params) { return {params[1], params[3]}; }

template <typename Options>
auto with_all(Options options) {
  options.weight_decay(0.1);
  if constexpr (requires { options.momentum(); }) {
    options.momentum(0.9).dampening(0.3);
  } else {
    options.amsgrad(true);
  }
  return options;
}

template <typename Optimizer>
using OptionsOf =
    std::conditional_t<std::is_base_of_v<expected::SGD, Optimizer> ||
                           std::is_same_v<Optimizer, actual::SGD>,
                       expected::SGDOptions,
                       std::conditional_t<std::is_base_of_v<expected::Adam, Optimizer> ||
                                              std::is_same_v<Optimizer, actual::Adam>,
                                          expected::AdamOptions, expected::AdamWOptions>>;

template <typename Optimizer>
Optimizer make(const Params& params, double first = 0.05, double second = 0.1) {
  using Options = OptionsOf<Optimizer>;
  return Optimizer(two_groups(params, with_all(Options(first))), with_all(Options(second)));
}

AmpStep amp_step_with(double inv_scale, float found_inf, bool write_grads) {
  AmpStep amp_step;
  amp_step.inv_scale = at::full({1}, inv_scale);
  amp_step.clip_coef = at::full({1}, 0.5);
  amp_step.clip_value = 0.25;
  amp_step.found_inf = at::full({1}, found_inf);
  amp_step.write_grads = write_grads;
  return amp_step;
}

}  // namespace

TEMPLATE_TEST_CASE("float64 parameters take LibTorch's steps, bit for bit", "[optim]", Sgd, Adam,
                   AdamW) {
  auto params = mixed_params();
  auto reference = copy_of(params);
  auto mine = make<typename TestType::first_type>(params);
  auto torchs = make<typename TestType::second_type>(reference);
  for (int step = 0; step < 10; ++step) {
    set_gradients({&params, &reference});
    mine.step();
    torchs.step();
    REQUIRE(equal(doubles_of(params), doubles_of(reference)));
    REQUIRE(difference(params, reference) <= 8.0);
  }
}

TEMPLATE_TEST_CASE("float64 parameters: checkpoints at any step, and with LibTorch's", "[optim]",
                   Sgd, Adam, AdamW) {
  using Own = typename TestType::first_type;
  using Torchs = typename TestType::second_type;
  const int steps = GENERATE(0, 1, 4);
  auto params = mixed_params();
  auto mine = make<Own>(params);
  for (int step = 0; step < steps; ++step) {
    set_gradients({&params});
    mine.step();
  }
  auto copies = copy_of(params);
  auto torch_copies = copy_of(params);
  auto resumed = make<Own>(copies, 0.9, 0.8);
  auto torchs = make<Torchs>(torch_copies, 0.7, 0.6);
  transfer(mine, resumed);
  transfer(mine, torchs);
  auto back_copies = copy_of(params);
  auto back = make<Own>(back_copies, 0.5, 0.4);
  transfer(torchs, back);
  for (int step = 0; step < 5; ++step) {
    set_gradients({&params, &copies, &torch_copies, &back_copies});
    mine.step();
    resumed.step();
    torchs.step();
    back.step();
    REQUIRE(equal(params, copies));
    REQUIRE(equal(params, back_copies));
    REQUIRE(equal(doubles_of(params), doubles_of(torch_copies)));
  }
}

TEMPLATE_TEST_CASE("float64 parameters: the AmpStep unscales, clips and skips", "[optim]", Sgd,
                   Adam, AdamW) {
  const bool write_grads = GENERATE(true, false);
  auto params = mixed_params();
  auto reference = copy_of(params);
  auto mine = make<typename TestType::first_type>(params);
  auto torchs = make<typename TestType::second_type>(reference);
  for (int step = 0; step < 6; ++step) {
    const bool skip = step % 3 == 0;  // The first one, too.
    set_gradients({&params, &reference});
    Params given;
    Params unscaled;
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].grad().defined()) {
        given.push_back(params[i].grad().clone());
        reference[i].mutable_grad().mul_(0.125).mul_(0.5).clamp_(-0.25, 0.25);
        unscaled.push_back(reference[i].grad());
      }
    }
    mine.set_amp_step(amp_step_with(0.125, skip ? 2.0F : 0.0F, write_grads));
    mine.step();
    Params left;
    for (auto& param : params) {
      if (param.grad().defined()) {
        left.push_back(param.grad());
      }
    }
    REQUIRE(equal(left, write_grads ? unscaled : given));
    if (!skip) {
      torchs.step();
    }
    REQUIRE(equal(doubles_of(params), doubles_of(reference)));
  }
}

TEMPLATE_TEST_CASE("float64 parameters: behind a scaler, whose overflows skip them too", "[optim]",
                   Sgd, Adam, AdamW) {
  auto params = mixed_params();
  auto optimizer = make<typename TestType::first_type>(params);
  fastamp::GradScaler scaler(
      fastamp::GradScalerOptions().device(c10::kCPU).init_scale(8.0).growth_interval(100));
  scaler.scale(at::ones({}));
  const auto before = copy_of(params);
  for (auto& param : params) {
    param.mutable_grad() = at::ones_like(param.detach());
  }
  params[3].mutable_grad()[0][0] = std::numeric_limits<double>::infinity();
  scaler.step(optimizer);
  scaler.update();
  CHECK(scaler.step_was_skipped());
  CHECK(equal(params, before));
  for (auto& param : params) {
    param.mutable_grad() = at::full_like(param.detach(), 4.0);  // The scale is 4 now.
  }
  scaler.step(optimizer);
  scaler.update();
  CHECK_FALSE(scaler.step_was_skipped());
  auto reference = copy_of(before);
  auto torchs = make<typename TestType::second_type>(reference);
  for (auto& param : reference) {
    param.mutable_grad() = at::ones_like(param.detach());
  }
  torchs.step();
  CHECK(equal(doubles_of(params), doubles_of(reference)));
}

TEST_CASE("float64 parameters: maximize and rates that are tensors", "[optim]") {
  auto param = at::ones({3}, at::kDouble).requires_grad_(true);
  param.mutable_grad() = at::ones({3}, at::kDouble);
  actual::SGD optimizer(Params{param}, actual::SGDOptions(1.0).maximize(true));
  optimizer.step();
  CHECK(param.equal(at::full({3}, 2.0, at::kDouble)));
  CHECK(param.grad().equal(at::ones({3}, at::kDouble)));
  optimizer.set_learning_rates({at::full({}, 0.5)});
  optimizer.step();
  CHECK(param.equal(at::full({3}, 2.5, at::kDouble)));
}

TEST_CASE("float64 parameters: a sparse gradient of SGD is the dense one", "[optim]") {
  auto param = at::ones({3}, at::kDouble).requires_grad_(true);
  param.mutable_grad() = at::sparse_coo_tensor(at::tensor({1, 1}, at::kLong).reshape({1, 2}),
                                               at::ones({2}, at::kDouble), {3});
  actual::SGD optimizer(Params{param}, actual::SGDOptions(0.5).weight_decay(1.0));
  optimizer.step();
  CHECK(param.equal(at::tensor({0.5, -0.5, 0.5}, at::kDouble)));
  CHECK(param.grad().is_sparse());
}

TEST_CASE("complex parameters take LibTorch's steps", "[optim]") {
  auto param = at::ones({3}, at::kComplexFloat).requires_grad_(true);
  param.mutable_grad() = at::ones({3}, at::kComplexFloat);
  actual::SGD optimizer(Params{param}, actual::SGDOptions(0.5).momentum(0.9));
  optimizer.step();
  CHECK(param.equal(at::full({3}, 0.5, at::kFloat).to(at::kComplexFloat)));
}

TEST_CASE("a parameter listed twice is stepped once by LibTorch's code", "[optim]") {
  auto param = at::ones({2}, at::kDouble).requires_grad_(true);
  param.mutable_grad() = at::ones({2}, at::kDouble);
  actual::SGD optimizer(Params{param, param}, actual::SGDOptions(0.5));
  optimizer.step();
  CHECK(param.equal(at::full({2}, 0.5, at::kDouble)));
}

TEST_CASE("momentum switched on and off: only steps that a buffer saw count", "[optim]") {
  auto param = at::ones({2}, at::kDouble).requires_grad_(true);
  auto other = at::ones({2}, at::kDouble).requires_grad_(true);
  actual::SGD mine(Params{param}, actual::SGDOptions(0.5).momentum(0.5).dampening(0.5));
  expected::SGD torchs(Params{other}, expected::SGDOptions(0.5).momentum(0.5).dampening(0.5));
  for (const double momentum : {0.0, 0.5, 0.0, 0.5}) {
    for (expected::Optimizer* optimizer :
         {static_cast<expected::Optimizer*>(&mine), static_cast<expected::Optimizer*>(&torchs)}) {
      static_cast<expected::SGDOptions&>(optimizer->param_groups()[0].options()).momentum(momentum);
    }
    param.mutable_grad() = at::randn({2}, at::kDouble);
    other.mutable_grad() = param.grad().clone();
    mine.step();
    torchs.step();
    CHECK(param.equal(other));
  }
}
