// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/sgd.h>

#include <ATen/ops/tensor.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::unique_ptr<torch::optim::Optimizer> optimizer_over(const Params& params, bool own) {
  if (own) {
    return std::make_unique<SGD>(params, SGDOptions(1.0));
  }
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(1.0));
}

}  // namespace

TEST_CASE("clip_grad_norm_: as torch clips unscaled gradients", "[scaler]") {
  const bool own = GENERATE(true, false);
  const double norm_type = GENERATE(2.0, 1.0, kInfinity);
  const double max_norm = GENERATE(0.5, 1e9);
  const bool unscaled_before = GENERATE(false, true);
  auto scaler = started(cpu_options().init_scale(64.0));
  auto params = make_params();
  params.erase(params.begin() + 3);  // LibTorch's infinity norm takes no empty gradient.
  auto reference = copy_of(params);
  set_gradients({&params, &reference});
  for (auto& param : reference) {
    if (param.grad().defined()) {
      param.mutable_grad().div_(64.0);
    }
  }
  const double expected = torch::nn::utils::clip_grad_norm_(reference, max_norm, norm_type);
  const auto optimizer = optimizer_over(params, own);
  if (unscaled_before) {
    scaler.unscale_(*optimizer);
  }
  const auto norm = scaler.clip_grad_norm_(*optimizer, max_norm, norm_type);
  CHECK(norm.item<double>() == Approx(expected).epsilon(1e-5));
  scaler.step(*optimizer);
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i].grad().defined()) {
      CHECK(params[i].grad().allclose(reference[i].grad(), 1e-5, 1e-8));
    }
  }
}

TEST_CASE("clip: by norm, then by value, then by norm again, in that order", "[scaler]") {
  const bool own = GENERATE(true, false);
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = at::zeros({2}).requires_grad_(true);
  parameter.mutable_grad() = at::tensor({12.0F, 16.0F});  // Unscaled: 3 and 4, of norm 5.
  const auto optimizer = optimizer_over({parameter}, own);
  CHECK(scaler.clip_grad_norm_(*optimizer, 2.5).item<float>() == 5.0F);  // 1.5 and 2
  scaler.clip_grad_value_(*optimizer, 1.5);                              // 1.5 and 1.5
  const auto norm = scaler.clip_grad_norm_(*optimizer, 1.5).item<float>();
  CHECK(norm == Approx(1.5 * std::sqrt(2.0)).epsilon(1e-5));
  scaler.step(*optimizer);
  CHECK(parameter.allclose(at::full({2}, -1.5 / std::sqrt(2.0)), 1e-5));
  CHECK(parameter.grad().allclose(-parameter.detach(), 1e-5));
}

TEST_CASE("clip: fastamp's put it off to the step, others and unscale_ do it at once", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(16.0F);
  SECTION("fastamp's") {
    SGD optimizer(Params{parameter}, SGDOptions(1.0));
    scaler.clip_grad_value_(optimizer, 1.0);
    CHECK(parameter.grad().equal(at::full({2}, 16.0)));
    scaler.unscale_(optimizer);
    CHECK(parameter.grad().equal(at::ones({2})));
    scaler.step(optimizer);
    CHECK(parameter.equal(at::zeros({2})));
  }
  SECTION("torch's") {
    auto optimizer = sgd({parameter});
    scaler.clip_grad_value_(optimizer, 1.0);
    CHECK(parameter.grad().equal(at::ones({2})));
    scaler.step(optimizer);
    CHECK(parameter.equal(at::zeros({2})));
  }
}

TEST_CASE("clip: gradients edited after it are checked anew", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(4.0F);
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  scaler.clip_grad_norm_(optimizer, 1e9);
  parameter.mutable_grad().fill_(kInfinity);
  scaler.step(optimizer);
  scaler.update();
  CHECK(scaler.step_was_skipped());
  CHECK(parameter.equal(at::ones({2})));
}

TEST_CASE("clip_grad_norm_: a norm that is not finite is refused if asked for", "[scaler]") {
  const bool own = GENERATE(true, false);
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(static_cast<float>(kInfinity));
  const auto optimizer = optimizer_over({parameter}, own);
  CHECK(message_of([&] {
          scaler.clip_grad_norm_(*optimizer, 1.0, 2.0, true);
        }).find("cannot be clipped") != std::string::npos);
  scaler.step(*optimizer);
  scaler.update();
  CHECK(scaler.step_was_skipped());
  CHECK(parameter.equal(at::ones({2})));
  CHECK(scaler.get_scale() == 2.0);
}

TEST_CASE("clip: calls out of order and bad values are refused", "[scaler]") {
  auto parameter = parameter_with(4.0F);
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  GradScaler fresh(cpu_options());
  CHECK_THROWS_AS(fresh.clip_grad_norm_(optimizer, 1.0), c10::Error);
  CHECK_THROWS_AS(fresh.clip_grad_value_(optimizer, 1.0), c10::Error);
  auto scaler = started(cpu_options());
  CHECK_THROWS_AS(scaler.clip_grad_value_(optimizer, -1.0), c10::ValueError);
  scaler.step(optimizer);
  CHECK_THROWS_AS(scaler.clip_grad_norm_(optimizer, 1.0), c10::Error);
  CHECK_THROWS_AS(scaler.clip_grad_value_(optimizer, 1.0), c10::Error);
}

TEST_CASE("clip: without gradients the norm is 0", "[scaler]") {
  auto scaler = started(cpu_options());
  SGD optimizer(Params{at::ones({2}).requires_grad_(true)}, SGDOptions(1.0));
  CHECK(scaler.clip_grad_norm_(optimizer, 1.0).item<float>() == 0.0F);
}

TEST_CASE("clip: a disabled scaler clips at once", "[scaler]") {
  GradScaler scaler(cpu_options().enabled(false));
  auto parameter = parameter_with(3.0F, 4);
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  CHECK(scaler.clip_grad_norm_(optimizer, 3.0).item<float>() == 6.0F);
  CHECK(parameter.grad().allclose(at::full({4}, 1.5), 1e-5));
  scaler.clip_grad_value_(optimizer, 1.0);
  CHECK(parameter.grad().equal(at::ones({4})));
}

TEST_CASE("clip_grad_value_: what is within stays, what is beyond becomes the value", "[scaler]") {
  const bool own = GENERATE(true, false);
  const bool enabled = GENERATE(true, false);
  auto parameter = at::zeros({5}).requires_grad_(true);
  const auto gradient = at::tensor({-3.0F, -0.5F, 0.0F, 0.25F, 7.0F});
  parameter.mutable_grad() = gradient * (enabled ? 4.0 : 1.0);
  const auto optimizer = optimizer_over({parameter}, own);
  auto scaler = started(cpu_options().init_scale(4.0).enabled(enabled));
  scaler.clip_grad_value_(*optimizer, 1.0);
  scaler.step(*optimizer);
  CHECK(parameter.equal(-gradient.clamp(-1.0, 1.0)));
}
