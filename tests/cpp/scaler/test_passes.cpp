// SPDX-License-Identifier: Apache-2.0
// GradScaler::pass_() and unscale(): several passes over a loss in one iteration.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <memory>
#include <stdexcept>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using Catch::Matchers::Contains;
using fastamp::GradScaler;

namespace {

constexpr double kScale = 1024.0;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

at::Tensor make_weight() { return at::tensor({1.0F, -2.0F, 0.5F}).requires_grad_(); }

at::Tensor loss_of(const at::Tensor& weight) { return (weight * weight).sum(); }

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

Optimizer plain(const at::Tensor& weight) {
  return std::make_unique<torch::optim::SGD>(std::vector{weight}, torch::optim::SGDOptions(0.1));
}

Optimizer fused(const at::Tensor& weight) {
  return std::make_unique<fastamp::optim::AdamW>(std::vector{weight},
                                                 fastamp::optim::AdamWOptions(0.1));
}

/// Goes uphill by the gradients of a first pass, and steps from where it was by those of a second.
/// @param bad  The pass that overflows; 2: none.
void step_twice(GradScaler& scaler, torch::optim::Optimizer& optimizer, const at::Tensor& weight,
                int bad) {
  const auto backward = [&](int pass) {
    optimizer.zero_grad();
    auto loss = loss_of(weight);
    scaler.scale(loss).backward();
    if (pass == bad) {
      weight.mutable_grad()[1] = kInfinity;
    }
    return loss;
  };
  const auto loss = scaler.pass_(optimizer, [&] { return backward(0); });
  REQUIRE(loss.item<float>() == loss_of(weight).item<float>());
  const auto before = weight.detach().clone();
  {
    const at::NoGradGuard no_grad;
    const auto expected = bad == 0 ? at::zeros_like(before) : 2 * before;
    REQUIRE(at::equal(weight.grad(), expected));
    weight.add_(weight.grad(), 0.5);
  }
  backward(1);
  {
    const at::NoGradGuard no_grad;
    weight.copy_(before);
  }
  scaler.step(optimizer);
  scaler.update();
}

}  // namespace

TEST_CASE("passes: an overflow in either skips the step and lowers the scale") {
  for (const auto& make : {plain, fused}) {
    for (const int bad : {0, 1, 2}) {
      const auto weight = make_weight();
      const auto optimizer = make(weight);
      GradScaler scaler(cpu_options().init_scale(kScale));
      const auto before = weight.detach().clone();
      step_twice(scaler, *optimizer, weight, bad);
      CHECK(at::equal(weight, before) == (bad != 2));
      CHECK(scaler.step_was_skipped() == (bad != 2));
      CHECK(scaler.get_scale() == (bad == 2 ? kScale : kScale / 2));
      CHECK(scaler.overflow_report().gradients.size() == (bad == 2 ? 0 : 1));
      step_twice(scaler, *optimizer, weight, 2);
      CHECK_FALSE(scaler.step_was_skipped());
    }
  }
}

TEST_CASE("passes: the step has the bits of one without a scaler") {
  const auto weight = make_weight();
  const auto reference = make_weight();
  const auto optimizer = plain(weight);
  const auto torchs = plain(reference);
  GradScaler scaler(cpu_options().init_scale(kScale));
  for (int i = 0; i < 5; ++i) {
    step_twice(scaler, *optimizer, weight, 2);
    torchs->zero_grad();
    loss_of(reference).backward();
    const auto before = reference.detach().clone();
    {
      const at::NoGradGuard no_grad;
      reference.add_(reference.grad(), 0.5);
    }
    torchs->zero_grad();
    loss_of(reference).backward();
    {
      const at::NoGradGuard no_grad;
      reference.copy_(before);
    }
    torchs->step();
    REQUIRE(at::equal(weight, reference));
  }
}

TEST_CASE("passes: each call of a closure of LBFGS is one") {
  const auto weight = make_weight();
  torch::optim::LBFGS lbfgs(std::vector{weight}, torch::optim::LBFGSOptions(0.5).max_iter(5));
  GradScaler scaler(cpu_options().init_scale(kScale));
  int calls = 0;
  const auto closure = [&] {
    return scaler.pass_(lbfgs, [&] {
      lbfgs.zero_grad();
      auto loss = loss_of(weight);
      scaler.scale(loss).backward();
      if (++calls == 8) {
        weight.mutable_grad()[0] = kInfinity;
      }
      return loss;
    });
  };
  lbfgs.step(closure);
  scaler.update();
  CHECK_FALSE(scaler.step_was_skipped());
  lbfgs.step(closure);
  scaler.update();
  CHECK(scaler.get_scale() == kScale / 2);
  CHECK(at::isfinite(weight).all().item<bool>());
  lbfgs.step(closure);
  scaler.update();
  CHECK(loss_of(weight).item<float>() < 0.01F);
}

TEST_CASE("passes: misuse is refused") {
  const auto weight = make_weight();
  const auto optimizer = plain(weight);
  GradScaler scaler(cpu_options().init_scale(kScale));
  const auto scaled = [&] {
    auto loss = loss_of(weight);
    scaler.scale(loss).backward();
    return loss;
  };
  CHECK_THROWS_WITH(scaler.pass_(*optimizer, nullptr), Contains("pass_: expected a closure"));
  CHECK_THROWS_WITH(scaler.pass_(*optimizer, [&] { return loss_of(weight); }),
                    Contains("gives its loss to scale()"));
  CHECK_THROWS_WITH(scaler.pass_(*optimizer, [&] { return scaler.scale(loss_of(weight)); }),
                    Contains("at least one gradient"));
  scaled();
  scaler.unscale_(*optimizer);
  const auto not_run = [&] {
    CHECK(false);
    return scaled();
  };
  CHECK_THROWS_WITH(scaler.pass_(*optimizer, not_run), Contains("got one after unscale_()"));
  scaler.step(*optimizer);
  CHECK_THROWS_WITH(scaler.pass_(*optimizer, not_run), Contains("got one after step()"));
  scaler.update();
  CHECK_THROWS_AS(
      scaler.pass_(*optimizer, []() -> at::Tensor { throw std::runtime_error("interrupted"); }),
      std::runtime_error);
  optimizer->zero_grad();
  CHECK(scaler.pass_(*optimizer, scaled).defined());
}

TEST_CASE("passes: unscale takes the scale out of tensors, and of a disabled scaler does nothing") {
  GradScaler scaler(cpu_options().init_scale(kScale));
  const auto ones = at::ones({2});
  CHECK_THROWS_WITH(scaler.unscale(ones), Contains("unscale: expected scale()"));
  scaler.scale(ones);
  const auto found = scaler.unscale({ones, ones.to(at::kHalf), ones.to(at::kDouble)});
  CHECK(found[1].scalar_type() == at::kFloat);
  CHECK(found[2].scalar_type() == at::kDouble);
  for (const auto& each : found) {
    CHECK((each == 1 / kScale).all().item<bool>());
  }
  CHECK_THROWS_AS(scaler.unscale(ones.to(at::kLong)), c10::ValueError);
  CHECK_THROWS_AS(scaler.unscale(at::Tensor()), c10::ValueError);
  GradScaler disabled(cpu_options().enabled(false));
  CHECK(disabled.unscale(ones).is_same(ones));
  const auto weight = make_weight();
  const auto optimizer = plain(weight);
  CHECK(disabled.pass_(*optimizer, [&] { return ones; }).is_same(ones));
}
