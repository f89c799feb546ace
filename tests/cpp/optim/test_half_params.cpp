// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::optim::AdamW;
using fastamp::optim::AdamWOptions;
using fastamp::optim::AdamWParamState;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;
using fastamp::optim::SGDParamState;
using fastamp::optim::StateRounding;

namespace {

at::Tensor leaf(const at::Tensor& value) { return value.detach().clone().requires_grad_(true); }

const at::Tensor& master_of(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  return static_cast<SGDParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl())).master();
}

}  // namespace

TEST_CASE("16-bit parameters follow fp32 master weights", "[optim]") {
  const auto dtype = GENERATE(at::kHalf, at::kBFloat16);
  // Each step is below half an ulp of 1: without a master the weight would never move.
  auto half = leaf(at::ones({4}).to(dtype));
  auto single = leaf(at::ones({4}));
  SGD optimizer(Params{half}, SGDOptions(1.0));
  SGD reference(Params{single}, SGDOptions(1.0));
  for (int step = 0; step < 64; ++step) {
    half.mutable_grad() = at::full({4}, 1.0 / 8192).to(dtype);
    single.mutable_grad() = at::full({4}, 1.0 / 8192);
    optimizer.step();
    reference.step();
    REQUIRE(master_of(optimizer, half).equal(single));
    REQUIRE(half.equal(single.to(dtype)));
  }
  CHECK(half[0].item<float>() < 1.0F);
}

TEST_CASE("16-bit parameters that somebody else changed give their master the new value",
          "[optim]") {
  auto half = leaf(at::ones({4}).to(at::kBFloat16));
  SGD optimizer(Params{half}, SGDOptions(1.0));
  const auto step = [&](float gradient) {
    half.mutable_grad() = at::full({4}, gradient).to(at::kBFloat16);
    optimizer.step();
  };
  step(1.0F / 8192);
  {
    const at::NoGradGuard no_grad;
    half[1] = 5.0;  // The others keep the bits below bfloat16's.
  }
  half.data()[2] = 3.0;  // Bumps no version counter.
  step(0.0F);
  const auto& master = master_of(optimizer, half);
  CHECK(master[0].item<float>() == 1.0F - 1.0F / 8192);
  CHECK(master[1].item<float>() == 5.0F);
  CHECK(half[1].item<float>() == 5.0F);
  CHECK(master[2].item<float>() == 3.0F);
  CHECK(half[2].item<float>() == 3.0F);
}

TEST_CASE("bf16 moments hold the rounded fp32 ones", "[optim]") {
  auto param = leaf(at::randn({100}));
  auto reference = leaf(param);
  AdamW optimizer(Params{param}, AdamWOptions(0.01)
                                     .state_dtype(at::kBFloat16)
                                     .state_rounding(StateRounding::kNearest)
                                     .amsgrad(true));
  AdamW single(Params{reference}, AdamWOptions(0.01).amsgrad(true));
  const auto gradient = at::randn({100});
  param.mutable_grad() = gradient.clone();
  reference.mutable_grad() = gradient.clone();
  optimizer.step();
  single.step();
  const auto& state =
      static_cast<AdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  const auto& exact =
      static_cast<AdamWParamState&>(*single.state().at(reference.unsafeGetTensorImpl()));
  CHECK(state.exp_avg().scalar_type() == at::kBFloat16);
  CHECK(state.exp_avg().equal(exact.exp_avg().to(at::kBFloat16)));
  CHECK(state.exp_avg_sq().equal(exact.exp_avg_sq().to(at::kBFloat16)));
  CHECK(state.max_exp_avg_sq().equal(exact.max_exp_avg_sq().to(at::kBFloat16)));
  CHECK(param.equal(reference));  // The first step does not read them.
}

TEST_CASE("a parameter's own dtype and its gradient's may differ", "[optim]") {
  auto param = leaf(at::randn({10}));
  auto reference = leaf(param);
  AdamW optimizer(Params{param});
  AdamW plain(Params{reference});
  for (int step = 0; step < 5; ++step) {
    const auto gradient = at::randn({10}).to(at::kBFloat16);
    param.unsafeGetTensorImpl()->mutable_grad() = gradient;  // What `grad_dtype` allows.
    reference.mutable_grad() = gradient.to(at::kFloat);
    optimizer.step();
    plain.step();
  }
  CHECK(param.equal(reference));
}
