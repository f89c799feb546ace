// SPDX-License-Identifier: Apache-2.0
// Regions that stay open across GradScaler::step(), and kept casts: no step leaves a stale weight.

#include "helpers.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::GradScaler;
using fastamp::KeepCastsGuard;
using fastamp::test::cpu_options;
using fastamp::test::first_sum;
using fastamp::test::make_weight;
using torch::optim::Optimizer;

namespace {

/// As users write them: through `.data()`, which moves no version.
class UsersOwn : public Optimizer {
 public:
  explicit UsersOwn(std::vector<at::Tensor> params)
      : Optimizer(std::move(params),
                  std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(1.0))) {}
  at::Tensor step(LossClosure closure) override {
    at::Tensor loss;
    for (int i = 0; i < evaluations; ++i) {
      loss = closure ? closure() : at::Tensor();
      for (const auto& param : param_groups()[0].params()) {
        param.data().sub_(param.grad());
        if (throws) {
          throw std::runtime_error("after the first parameter");
        }
      }
    }
    return loss;
  }
  int evaluations = 1;
  bool throws = false;
};

/// fastamp's, with writes of its own.
class DerivedFromOurs : public fastamp::optim::SGD {
 public:
  explicit DerivedFromOurs(const std::vector<at::Tensor>& params)
      : SGD(params, fastamp::optim::SGDOptions(1.0)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    auto loss = SGD::step(std::move(closure));
    for (const auto& param : param_groups()[0].params()) {
      param.data().sub_(1.0);
    }
    return loss;
  }
};

using Make = std::unique_ptr<Optimizer> (*)(const at::Tensor& weight);

std::vector<std::pair<std::string, Make>> optimizers() {
  using namespace torch::optim;
  return {
      {"SGD",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<SGD>(std::vector{weight}, SGDOptions(1.0));
       }},
      {"Adam",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<Adam>(std::vector{weight}, AdamOptions(1.0));
       }},
      {"AdamW",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<AdamW>(std::vector{weight}, AdamWOptions(1.0));
       }},
      {"RMSprop",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<RMSprop>(std::vector{weight}, RMSpropOptions(1.0));
       }},
      {"Adagrad",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<Adagrad>(std::vector{weight}, AdagradOptions(1.0));
       }},
      {"LBFGS",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<LBFGS>(std::vector{weight}, LBFGSOptions(1.0));
       }},
      {"fastamp's",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<fastamp::optim::SGD>(std::vector{weight},
                                                      fastamp::optim::SGDOptions(1.0));
       }},
      {"fused",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         auto optimizer = std::make_unique<SGD>(std::vector{weight}, SGDOptions(1.0));
         fastamp::optim::fuse_(*optimizer);
         return optimizer;
       }},
      {"a user's",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<UsersOwn>(std::vector{weight});
       }},
      {"derived from fastamp's",
       [](const at::Tensor& weight) -> std::unique_ptr<Optimizer> {
         return std::make_unique<DerivedFromOurs>(std::vector{weight});
       }},
  };
}

/// What the weight is now, cast anew.
float exact_sum(const at::Tensor& weight) {
  return weight.detach().select(1, 0).to(at::kBFloat16).to(at::kFloat).sum().item<float>();
}

/// Three steps; after each, the region's cast is that of the weight as it is.
void check_steps(GradScaler& scaler, Optimizer& optimizer, const at::Tensor& weight,
                 const std::function<float()>& sum) {
  for (int step = 0; step < 3; ++step) {
    weight.mutable_grad() = at::ones({4, 2});
    const float before = exact_sum(weight);
    REQUIRE(sum() == before);
    if (scaler.is_enabled()) {
      scaler.scale(at::ones({}));
      scaler.step(optimizer);
      scaler.update();
    } else {
      scaler.step(optimizer, [&] { return at::ones({}); });
    }
    REQUIRE(exact_sum(weight) != before);
    REQUIRE(sum() == exact_sum(weight));
  }
}

}  // namespace

TEST_CASE("step: a region that stays open across it casts the weights again", "[scaler]") {
  const bool enabled = GENERATE(true, false);
  for (const auto& [name, make] : optimizers()) {
    if (name == "LBFGS" && enabled) {
      continue;  // It needs a closure, which an enabled scaler does not take.
    }
    INFO(name << ", enabled " << enabled);
    const auto weight = make_weight(4, 2, 5.0);
    const auto optimizer = make(weight);
    GradScaler scaler(cpu_options().init_scale(1.0).enabled(enabled));
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    check_steps(scaler, *optimizer, weight, [&] { return first_sum(weight); });
  }
}

TEST_CASE("step: kept casts of its weights are made again", "[scaler]") {
  const bool enabled = GENERATE(true, false);
  for (const auto& [name, make] : optimizers()) {
    if (name == "LBFGS" && enabled) {
      continue;
    }
    INFO(name << ", enabled " << enabled);
    const auto weight = make_weight(4, 2, 5.0);
    const auto optimizer = make(weight);
    GradScaler scaler(cpu_options().init_scale(1.0).enabled(enabled));
    const KeepCastsGuard keep({weight});
    check_steps(scaler, *optimizer, weight, [&] {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      return first_sum(weight);
    });
  }
}

TEST_CASE("step: a closure that is evaluated between writes sees the weights as they are",
          "[scaler]") {
  const auto weight = make_weight(4, 2);
  weight.mutable_grad() = at::ones({4, 2});
  UsersOwn optimizer({weight});
  optimizer.evaluations = 3;
  GradScaler scaler(cpu_options().enabled(false));
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  std::vector<float> sums;
  scaler.step(optimizer, [&] {
    sums.push_back(first_sum(weight));
    return at::ones({});
  });
  CHECK(sums == std::vector<float>{4, 0, -4});
}

TEST_CASE("step: one that throws midway leaves no stale cast", "[scaler]") {
  const bool enabled = GENERATE(true, false);
  const auto weight = make_weight(4, 2);
  UsersOwn optimizer({weight});
  optimizer.throws = true;
  weight.mutable_grad() = at::ones({4, 2});
  GradScaler scaler(cpu_options().init_scale(1.0).enabled(enabled));
  scaler.scale(at::ones({}));
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(weight) == 4);
  CHECK_THROWS_AS(scaler.step(optimizer), std::runtime_error);
  CHECK(first_sum(weight) == 0);
}

TEST_CASE("step: casts of weights that it did not touch are kept", "[scaler]") {
  const auto weight = make_weight(4, 2);
  const auto other = make_weight(4, 2);
  weight.mutable_grad() = at::ones({4, 2});
  auto optimizer = fastamp::test::sgd({weight});
  GradScaler scaler(cpu_options().init_scale(1.0));
  scaler.scale(at::ones({}));
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  first_sum(other);
  scaler.step(optimizer);
  CHECK(fastamp::test::is_cast_kept(other));
}

TEST_CASE("step: weight_copies of our own optimizers outlive it", "[scaler]") {
  const auto weight = make_weight(4, 2);
  fastamp::optim::SGD optimizer({weight},
                                fastamp::optim::SGDOptions(1.0).autocast_dtype(at::kBFloat16));
  const bool enabled = GENERATE(true, false);
  GradScaler scaler(cpu_options().init_scale(1.0).enabled(enabled));
  fastamp::CastCounts last;
  for (int step = 0; step < 3; ++step) {
    const fastamp::Trace trace;
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      first_sum(weight);
    }
    last = trace.totals();
    weight.mutable_grad() = at::ones({4, 2});
    scaler.scale(at::ones({}));
    scaler.step(optimizer);
    scaler.update();
  }
  CHECK(last.weight_casts == 0);
  CHECK(last.kept_hits == 1);
}
