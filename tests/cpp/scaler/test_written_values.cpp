// SPDX-License-Identifier: Apache-2.0
// No inverse, factor or unscaled value that is not finite reaches a weight.

#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/ops/equal.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Kind {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> make;
};

std::vector<Kind> kinds() {
  using Params = std::vector<at::Tensor>;
  return {
      {"LibTorch's",
       [](Params p) {
         return std::make_unique<torch::optim::SGD>(std::move(p), torch::optim::SGDOptions(0.1));
       }},
      {"fused",
       [](Params p) {
         auto made =
             std::make_unique<torch::optim::AdamW>(std::move(p), torch::optim::AdamWOptions(0.1));
         fastamp::optim::fuse_(*made);
         return made;
       }},
      {"fastamp's",
       [](Params p) {
         return std::make_unique<fastamp::optim::SGD>(std::move(p),
                                                      fastamp::optim::SGDOptions(0.1));
       }},
  };
}

/// What is done between backward and step.
const std::vector<std::function<void(GradScaler&, torch::optim::Optimizer&)>>& calls() {
  static const std::vector<std::function<void(GradScaler&, torch::optim::Optimizer&)>> all{
      [](GradScaler&, torch::optim::Optimizer&) {},
      [](GradScaler& scaler, torch::optim::Optimizer& o) { scaler.unscale_(o); },
      [](GradScaler& scaler, torch::optim::Optimizer& o) { scaler.clip_grad_norm_(o, 1.0); },
      [](GradScaler& scaler, torch::optim::Optimizer& o) {
        scaler.unscale_(o);
        scaler.clip_grad_norm_(o, 1.0);
      },
      [](GradScaler& scaler, torch::optim::Optimizer& o) { scaler.clip_grad_value_(o, 1.0); },
  };
  return all;
}

}  // namespace

TEST_CASE("written values: a scale without an inverse steps nothing and says so", "[scaler]") {
  for (const auto& kind : kinds()) {
    for (const auto& call : calls()) {
      INFO(kind.name);
      const auto parameter = parameter_with(1.0F, 5000);
      const auto optimizer = kind.make({parameter});
      auto scaler = started(cpu_options());
      const CapturedWarnings warnings;
      for (int i = 0; i < 148; ++i) {
        parameter.mutable_grad() = at::full({5000}, i < 145 ? kInfinity : 1.0F);
        call(scaler, *optimizer);
        scaler.step(*optimizer);
        scaler.update();
        CHECK(scaler.step_was_skipped());
      }
      CHECK(at::equal(parameter.detach(), at::ones({5000})));
      CHECK(std::ranges::count_if(warnings.texts(), [](const std::string& text) {
              return text.find("inverse is not finite") != std::string::npos;
            }) == 1);
      scaler.update(2.0);
      parameter.mutable_grad() = at::ones({5000});
      scaler.step(*optimizer);
      scaler.update();
      CHECK_FALSE(scaler.step_was_skipped());
      CHECK_FALSE(at::equal(parameter.detach(), at::ones({5000})));
    }
  }
}

TEST_CASE("written values: a finite gradient that overflows when it is unscaled", "[scaler]") {
  for (const auto& kind : kinds()) {
    for (const auto& call : calls()) {
      INFO(kind.name);
      const auto parameter = parameter_with(1e-30F, 5000);
      parameter.mutable_grad().select(0, 4321).fill_(1e20);
      const auto optimizer = kind.make({parameter});
      auto scaler = started(cpu_options().init_scale(1e-30));
      call(scaler, *optimizer);
      scaler.step(*optimizer);
      scaler.update();
      CHECK(scaler.step_was_skipped());
      CHECK(at::equal(parameter.detach(), at::ones({5000})));
      const auto report = scaler.overflow_report();
      REQUIRE(report.gradients.size() == 1);
      CHECK(report.gradients[0].inf == 1);
    }
  }
}

TEST_CASE("written values: a clipping factor that is not finite", "[scaler]") {
  for (const auto& kind : kinds()) {
    for (const bool unscaled : {false, true}) {
      INFO(kind.name);
      const auto parameter = parameter_with(1.7e38F, 5000);
      const auto optimizer = kind.make({parameter});
      auto scaler = started(cpu_options().init_scale(1.0));
      if (unscaled) {
        scaler.unscale_(*optimizer);
      }
      scaler.clip_grad_norm_(*optimizer, std::numeric_limits<double>::infinity());
      scaler.step(*optimizer);
      scaler.update();
      CHECK(scaler.step_was_skipped());
      CHECK(at::equal(parameter.detach(), at::ones({5000})));
    }
  }
}

TEST_CASE("written values: GraphedStep", "[scaler]") {
  const auto parameter = at::ones({8}).requires_grad_(true);
  fastamp::optim::SGD optimizer({parameter}, fastamp::optim::SGDOptions(0.1));
  GradScaler scaler(cpu_options().init_scale(1e-30));
  fastamp::GraphedStep step([&](at::TensorList batch) { return (parameter * batch[0]).sum(); },
                            optimizer, scaler, {at::full({8}, 1e38F)},
                            fastamp::GraphedStepOptions().autocast(false));
  step({at::full({8}, 1e38F)});
  CHECK_FALSE(scaler.step_was_skipped());
  const auto before = parameter.detach().clone();
  scaler.update(std::ldexp(1.0, -130));
  step({at::full({8}, 1e38F)});
  CHECK(scaler.step_was_skipped());
  CHECK(at::equal(parameter.detach(), before));
}
