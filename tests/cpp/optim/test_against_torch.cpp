// SPDX-License-Identifier: Apache-2.0
// fastamp's beside LibTorch's optimizers, step by step.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <algorithm>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
namespace own = fastamp::optim;
namespace libtorch = torch::optim;

namespace {

template <typename Options>
Options sgd_options(bool second) {
  Options options(second ? 0.05 : 0.1);
  options.momentum(GENERATE(0.0, 0.9));
  options.weight_decay(GENERATE(0.0, 0.1));
  return options;
}

template <typename Options>
Options adam_options(double lr, double weight_decay, bool amsgrad) {
  Options options(lr);
  options.betas({0.8, 0.95}).eps(1e-6).weight_decay(weight_decay).amsgrad(amsgrad);
  return options;
}

template <typename Own, typename OwnOptions, typename Torchs, typename TorchsOptions>
void compare_adam() {
  const double weight_decay = GENERATE(0.0, 0.1);
  const bool amsgrad = GENERATE(false, true);
  auto params = make_params();
  auto reference = copy_of(params);
  Own optimizer(two_groups(params, adam_options<OwnOptions>(1e-3, 0.3, !amsgrad)),
                adam_options<OwnOptions>(1e-2, weight_decay, amsgrad));
  Torchs torchs(two_groups(reference, adam_options<TorchsOptions>(1e-3, 0.3, !amsgrad)),
                adam_options<TorchsOptions>(1e-2, weight_decay, amsgrad));
  for (int step = 0; step < 50; ++step) {
    set_gradients({&params, &reference});
    optimizer.step();
    torchs.step();
    // LibTorch rounds beta1 * m before the sum, torch.optim and we interpolate: the moments differ
    // in their last bits, the weights by at most an ulp of 1 or so per ten steps.
    REQUIRE(difference(params, reference) <= 8.0);
  }
}

}  // namespace

TEST_CASE("SGD equals torch::optim::SGD bit for bit", "[optim]") {
  const double momentum = GENERATE(0.0, 0.9);
  const double dampening = GENERATE(0.0, 0.3);
  const double weight_decay = GENERATE(0.0, 0.1);
  const bool nesterov = GENERATE(false, true) && momentum > 0 && dampening == 0;
  const auto fill = [&](auto options) {
    options.momentum(momentum).dampening(dampening).weight_decay(weight_decay).nesterov(nesterov);
    return options;
  };
  auto params = make_params();
  auto reference = copy_of(params);
  own::SGD optimizer(two_groups(params, own::SGDOptions(0.05).momentum(0.5)),
                     fill(own::SGDOptions(0.1)));
  libtorch::SGD torchs(two_groups(reference, libtorch::SGDOptions(0.05).momentum(0.5)),
                       fill(libtorch::SGDOptions(0.1)));
  for (int step = 0; step < 50; ++step) {
    set_gradients({&params, &reference});
    optimizer.step();
    torchs.step();
    REQUIRE(equal(params, reference));
  }
}

TEST_CASE("Adam is torch::optim::Adam but for the last bits", "[optim]") {
  compare_adam<own::Adam, own::AdamOptions, libtorch::Adam, libtorch::AdamOptions>();
}

TEST_CASE("AdamW is torch::optim::AdamW but for the last bits", "[optim]") {
  compare_adam<own::AdamW, own::AdamWOptions, libtorch::AdamW, libtorch::AdamWOptions>();
}

TEST_CASE("optimizers: options and defaults are LibTorch's", "[optim]") {
  const own::AdamWOptions mine;
  const libtorch::AdamWOptions torchs;
  CHECK(mine.lr() == torchs.lr());
  CHECK(mine.betas() == torchs.betas());
  CHECK(mine.eps() == torchs.eps());
  CHECK(mine.weight_decay() == torchs.weight_decay());
  CHECK(mine.amsgrad() == torchs.amsgrad());
  CHECK(own::AdamOptions().weight_decay() == libtorch::AdamOptions().weight_decay());
  CHECK(own::SGDOptions(0.5).get_lr() == 0.5);
}

TEST_CASE("optimizers: LibTorch's LR schedulers drive fastamp's", "[optim]") {
  auto params = make_params();
  auto reference = copy_of(params);
  own::SGD optimizer(params, own::SGDOptions(0.1).momentum(0.9));
  libtorch::SGD torchs(reference, libtorch::SGDOptions(0.1).momentum(0.9));
  torch::optim::StepLR schedule(optimizer, 3, 0.5);
  torch::optim::StepLR torchs_schedule(torchs, 3, 0.5);
  for (int step = 0; step < 12; ++step) {
    set_gradients({&params, &reference});
    optimizer.step();
    torchs.step();
    schedule.step();
    torchs_schedule.step();
    REQUIRE(equal(params, reference));
  }
  CHECK(optimizer.param_groups()[0].options().get_lr() ==
        torchs.param_groups()[0].options().get_lr());
  CHECK(optimizer.param_groups()[0].options().get_lr() < 0.05);
}

TEST_CASE("optimizers: groups can be added between steps", "[optim]") {
  auto params = make_params();
  auto reference = copy_of(params);
  own::SGD optimizer(Params{params[0]}, own::SGDOptions(0.1).momentum(0.9));
  libtorch::SGD torchs(Params{reference[0]}, libtorch::SGDOptions(0.1).momentum(0.9));
  for (std::size_t i = 1; i < params.size(); ++i) {
    set_gradients({&params, &reference});
    optimizer.step();
    torchs.step();
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(Params{params[i]}));
    torchs.add_param_group(torch::optim::OptimizerParamGroup(Params{reference[i]}));
  }
  CHECK(equal(params, reference));
  optimizer.zero_grad();
  CHECK_FALSE(params[0].grad().defined());
}

TEST_CASE("optimizers: a closure runs with gradients enabled and its loss is returned", "[optim]") {
  auto param = at::tensor({3.0F}).requires_grad_(true);
  own::SGD optimizer(Params{param}, own::SGDOptions(0.5));
  const at::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    auto result = (param * param).sum();
    result.backward();
    return result;
  });
  CHECK(loss.item<float>() == 9.0F);
  CHECK(param.item<float>() == 0.0F);
}

TEST_CASE("SGD: a sparse gradient acts as the dense one", "[optim]") {
  const double momentum = GENERATE(0.0, 0.9);
  auto sparse = at::randn({5, 2}).requires_grad_(true);
  auto dense = sparse.detach().clone().requires_grad_(true);
  own::SGD left(Params{sparse}, own::SGDOptions(0.1).momentum(momentum));
  own::SGD right(Params{dense}, own::SGDOptions(0.1).momentum(momentum));
  for (int step = 0; step < 3; ++step) {
    sparse.mutable_grad() = at::sparse_coo_tensor(at::tensor({1, 1, 4}, at::kLong).reshape({1, 3}),
                                                  at::randn({3, 2}), {5, 2});
    dense.mutable_grad() = sparse.grad().to_dense();
    left.step();
    right.step();
    CHECK(sparse.equal(dense));
    CHECK(sparse.grad().is_sparse());
  }
}

TEST_CASE("optimizers: what a fused step does not take is refused, and nothing changes",
          "[optim]") {
  auto good = at::randn({4}).requires_grad_(true);
  good.mutable_grad() = at::randn({4});
  const auto before = good.detach().clone();
  SECTION("a sparse gradient in Adam") {
    const auto dtype = GENERATE(at::kFloat, at::kDouble);  // The latter has no kernel.
    auto sparse = at::randn({4}, dtype).requires_grad_(true);
    sparse.mutable_grad() = at::sparse_coo_tensor(at::tensor({1}, at::kLong).reshape({1, 1}),
                                                  at::randn({1}, dtype), {4});
    own::Adam optimizer(Params{good, sparse});
    CHECK(message_of([&] { optimizer.step(); }).find("does not support sparse gradients") !=
          std::string::npos);
  }
  CHECK(good.equal(before));
}

TEST_CASE("optimizers: constructors refuse what LibTorch's refuse", "[optim]") {
  const Params params{at::randn({1}).requires_grad_(true)};
  using own::Adam, own::AdamOptions, own::AdamW, own::AdamWOptions, own::SGD, own::SGDOptions;
  CHECK_THROWS_AS(SGD(params, SGDOptions(-1.0)), c10::Error);
  CHECK_THROWS_AS(SGD(params, SGDOptions(std::nan(""))), c10::Error);
  CHECK_THROWS_AS(SGD(params, SGDOptions(1.0).momentum(-1)), c10::Error);
  CHECK_THROWS_AS(SGD(params, SGDOptions(1.0).weight_decay(-1)), c10::Error);
  CHECK_THROWS_AS(SGD(params, SGDOptions(1.0).nesterov(true)), c10::Error);
  CHECK_THROWS_AS(SGD(params, SGDOptions(1.0).nesterov(true).momentum(0.9).dampening(0.1)),
                  c10::Error);
  CHECK_THROWS_AS(SGD(params, SGDOptions(1.0).state_dtype(at::kHalf)), c10::Error);
  CHECK_THROWS_AS(Adam(params, AdamOptions(-1.0)), c10::Error);
  CHECK_THROWS_AS(Adam(params, AdamOptions().betas({1.0, 0.9})), c10::Error);
  CHECK_THROWS_AS(Adam(params, AdamOptions().betas({0.9, -0.1})), c10::Error);
  CHECK_THROWS_AS(Adam(params, AdamOptions().eps(-1.0)), c10::Error);
  CHECK_THROWS_AS(AdamW(params, AdamWOptions().weight_decay(-1.0)), c10::Error);
  CHECK(message_of([&] { AdamW(params, AdamWOptions().state_dtype(at::kDouble)); }) ==
        "AdamW: expected state_dtype to be Float, BFloat16 or Byte, got Double");
}
