// SPDX-License-Identifier: Apache-2.0
// GradScaler with optimizers whose step it decides on the device.

#include "helpers.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <limits>
#include <random>
#include <stdexcept>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Counts how often step() was called, and can fail.
struct WatchedSgd : SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    ++calls;
    if (fails) {
      throw std::runtime_error("step failed");
    }
    return SGD::step(std::move(closure));
  }
  int calls = 0;
  bool fails = false;
};

bool spoil(std::mt19937& random, const std::vector<Params*>& lists) {
  if (random() % 5 != 0) {
    return false;
  }
  for (auto* list : lists) {
    list->back().mutable_grad() =
        at::full_like(list->back(), random() % 2 == 0 ? kInfinity : std::nanf(""));
  }
  return true;
}

/// The same history by a scaler that folds everything into the step and by one that cannot.
template <typename Make>
void compare(const Make& make, bool clip, double tolerance) {
  std::mt19937 random(7);
  auto params = make_params();
  auto reference = copy_of(params);
  auto options = cpu_options().init_scale(1024.0).growth_interval(3);
  auto scaler = started(options);
  auto plain = started(options);
  auto optimizer = make(params);
  torch::optim::SGD torchs(reference, torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 100; ++step) {
    set_gradients({&params, &reference}, 1000.0);
    params[0].mutable_grad() = at::randn(params[0].sizes());  // One gradient at least.
    reference[0].mutable_grad() = params[0].grad().clone();
    const bool overflow = spoil(random, {&params, &reference});
    if (clip) {
      const auto norm = scaler.clip_grad_norm_(*optimizer, 1.0);
      const auto torchs_norm = plain.clip_grad_norm_(torchs, 1.0);
      REQUIRE((overflow || norm.allclose(torchs_norm, 1e-6)));
    }
    REQUIRE(scaler.step(*optimizer).has_value());
    REQUIRE(plain.step(torchs).has_value() == !overflow);
    scaler.update();
    plain.update();
    REQUIRE(scaler.step_was_skipped() == overflow);
    REQUIRE(scaler.step_was_skipped_for(*optimizer) == overflow);
    REQUIRE(scaler.get_scale() == plain.get_scale());
    REQUIRE(scaler.get_scale_async() == plain.get_scale());
    REQUIRE(difference(params, reference) <= tolerance);
    for (std::size_t i = 0; i < params.size(); ++i) {
      const bool defined = params[i].grad().defined();
      REQUIRE(defined == reference[i].grad().defined());
      REQUIRE((!defined || overflow || params[i].grad().allclose(reference[i].grad(), 1e-6, 1e-7)));
    }
  }
}

}  // namespace

TEST_CASE("step: fastamp's follows torch's protocol over torch's optimizer", "[scaler]") {
  const bool clip = GENERATE(false, true);
  compare(
      [](const Params& params) {
        return std::make_unique<SGD>(params, SGDOptions(0.05).momentum(0.9));
      },
      clip, clip ? 4.0 : 0.0);
}

TEST_CASE("step: a fused torch::optim::SGD does too", "[scaler]") {
  compare(
      [](const Params& params) {
        auto optimizer = std::make_unique<torch::optim::SGD>(
            params, torch::optim::SGDOptions(0.05).momentum(0.9));
        fastamp::optim::fuse_(*optimizer);
        return optimizer;
      },
      /*clip=*/false, 0.0);
}

TEST_CASE("step: the option fuse carries torch's optimizers, and leaves others alone", "[scaler]") {
  auto scaler = started(cpu_options().fuse(true).init_scale(4.0));
  auto first = parameter_with(kInfinity);
  auto second = parameter_with(2.0F);
  torch::optim::AdamW known(Params{first});
  torch::optim::RMSprop unknown(Params{second});
  CHECK(scaler.step(known).has_value());
  CHECK(scaler.step(unknown).has_value());
  CHECK(fastamp::optim::is_fused(known));
  CHECK_FALSE(fastamp::optim::is_fused(unknown));
  scaler.update();
  CHECK(scaler.step_was_skipped());
  CHECK(scaler.step_was_skipped_for(known));
  CHECK_FALSE(scaler.step_was_skipped_for(unknown));
  CHECK(first.equal(at::ones({2})));
  CHECK(scaler.get_scale() == 2.0);
}

TEST_CASE("step: our optimizer's step is called in any case", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(kInfinity);
  WatchedSgd optimizer(Params{parameter}, SGDOptions(1.0));
  scaler.step(optimizer);
  CHECK(optimizer.calls == 1);
  CHECK(parameter.equal(at::ones({2})));
}

TEST_CASE("step: an exception leaves no AmpStep behind", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(8.0F);
  WatchedSgd optimizer(Params{parameter}, SGDOptions(1.0));
  optimizer.fails = true;
  CHECK_THROWS_AS(scaler.step(optimizer), std::runtime_error);
  CHECK(parameter.grad().equal(at::full({2}, 8.0)));
  optimizer.fails = false;
  SECTION("the scaler's step can be repeated") {
    scaler.step(optimizer);
    CHECK(parameter.equal(at::full({2}, -1.0)));
  }
  SECTION("the optimizer's own step knows nothing of the scale") {
    optimizer.step();
    CHECK(parameter.equal(at::full({2}, -7.0)));
  }
}

TEST_CASE("step: gradients are left unscaled, or as they were", "[scaler]") {
  const bool keep = GENERATE(false, true);
  auto scaler = started(cpu_options().init_scale(4.0).keep_scaled_grads(keep));
  auto parameter = parameter_with(8.0F);
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  scaler.step(optimizer);
  CHECK(parameter.grad().equal(at::full({2}, keep ? 8.0 : 2.0)));
  CHECK(parameter.equal(at::full({2}, -1.0)));
}

TEST_CASE("step: after unscale_ the gradients are taken as they are", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(8.0F);
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  scaler.unscale_(optimizer);
  CHECK(parameter.grad().equal(at::full({2}, 2.0)));
  parameter.mutable_grad().mul_(0.5);
  scaler.step(optimizer);
  CHECK(parameter.equal(at::zeros({2})));
}

TEST_CASE("step: fp16 parameters train behind fp32 masters", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(1024.0));
  auto parameter = at::full({4}, 0.0625).to(at::kHalf).requires_grad_(true);
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  for (int step = 0; step < 16; ++step) {
    // Unscaled, 2^-26 is below fp16's smallest number: only the scaled gradient has it.
    parameter.mutable_grad() = at::full({4}, 1024.0 / 67108864.0).to(at::kHalf);
    scaler.step(optimizer);
    scaler.update();
  }
  const auto& state = static_cast<fastamp::optim::SGDParamState&>(
      *optimizer.state().at(parameter.unsafeGetTensorImpl()));
  CHECK(state.master().equal(at::full({4}, 0.0625 - 16.0 / 67108864.0)));
  parameter.mutable_grad() = at::ones({4}).to(at::kHalf);
  CHECK_THROWS_AS(scaler.unscale_(optimizer), c10::ValueError);
}

TEST_CASE("step: sparse gradients are unscaled and skipped like dense ones", "[scaler]") {
  const bool overflow = GENERATE(false, true);
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = at::ones({3}).requires_grad_(true);
  parameter.mutable_grad() = at::sparse_coo_tensor(at::tensor({1}, at::kLong).reshape({1, 1}),
                                                   at::tensor({overflow ? kInfinity : 8.0F}), {3});
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  scaler.clip_grad_norm_(optimizer, 1.0);
  scaler.step(optimizer);
  scaler.update();
  CHECK(scaler.step_was_skipped() == overflow);
  if (!overflow) {
    CHECK(parameter.allclose(at::tensor({1.0F, 0.0F, 1.0F}), 1e-5, 1e-5));
    CHECK(parameter.grad().to_dense().allclose(at::tensor({0.0F, 1.0F, 0.0F}), 1e-5, 1e-5));
  } else {
    CHECK(parameter.equal(at::ones({3})));
  }
}

TEST_CASE("step: several optimizers, losses and an iteration without one of them", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0).growth_interval(100));
  auto first = parameter_with(4.0F);
  auto second = parameter_with(kInfinity);
  SGD left(Params{first}, SGDOptions(1.0));
  SGD right(Params{second}, SGDOptions(1.0));
  scaler.step(left);
  scaler.step(right);
  scaler.update();
  CHECK(first.equal(at::zeros({2})));
  CHECK(second.equal(at::ones({2})));
  CHECK(scaler.step_was_skipped());
  CHECK_FALSE(scaler.step_was_skipped_for(left));
  CHECK(scaler.step_was_skipped_for(right));
  CHECK(scaler.get_scale() == 2.0);
  first.mutable_grad() = at::full({2}, 2.0);
  scaler.step(left);
  scaler.update();
  CHECK(first.equal(at::full({2}, -1.0)));
  CHECK_FALSE(scaler.step_was_skipped());
}

TEST_CASE("step: an optimizer of fastamp without gradients is refused, until it has some",
          "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = at::ones({2}).requires_grad_(true);
  SGD optimizer(Params{parameter}, SGDOptions(1.0));
  CHECK_THROWS_AS(scaler.step(optimizer), c10::Error);
  CHECK_THROWS_AS(scaler.update(), c10::Error);
  parameter.mutable_grad() = at::full({2}, 4.0);
  CHECK_NOTHROW(scaler.step(optimizer));
  CHECK_THROWS_AS(scaler.step(optimizer), c10::Error);
  CHECK_THROWS_AS(scaler.unscale_(optimizer), c10::Error);
}
