// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>

#include <ATen/ops/full.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <utility>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::optim::AmpStep;
using fastamp::optim::can_fuse;
using fastamp::optim::fuse_;
using fastamp::optim::fused_step;
using fastamp::optim::is_fused;
using fastamp::optim::unfuse_;

namespace {

template <typename Options>
Options options_with(double lr) {
  Options options(lr);
  options.weight_decay(0.1);
  if constexpr (std::is_same_v<Options, torch::optim::SGDOptions>) {
    options.momentum(0.9).dampening(0.3);
  } else {
    options.amsgrad(true);
  }
  return options;
}

/// SGD's arithmetic is torch's; Adam's differs in the last bits.
template <typename Optimizer>
constexpr double kTolerance = std::is_same_v<Optimizer, torch::optim::SGD> ? 0.0 : 4.0;

/// A derived class may have a step() of its own, so it is not fastamp's to carry.
struct DerivedSgd : torch::optim::SGD {
  using SGD::SGD;
};

}  // namespace

using Sgd = std::pair<torch::optim::SGD, torch::optim::SGDOptions>;
using Adam = std::pair<torch::optim::Adam, torch::optim::AdamOptions>;
using AdamW = std::pair<torch::optim::AdamW, torch::optim::AdamWOptions>;

namespace {

/// A fused optimizer and a plain one over equal parameters, some steps after the start.
template <typename Pair>
struct SideBySide {
  using Optimizer = typename Pair::first_type;
  using Options = typename Pair::second_type;

  explicit SideBySide(int before) {
    for (int step = 0; step < before; ++step) {
      set_gradients({&params, &reference});
      optimizer.step();
      torchs.step();
    }
    fuse_(optimizer);
  }
  template <typename Step>
  void agree(int steps, const Step& step, const std::function<void()>& after = [] {}) {
    for (int i = 0; i < steps; ++i) {
      set_gradients({&params, &reference});
      step(optimizer);
      torchs.step();
      after();
      REQUIRE(difference(params, reference) <= kTolerance<Optimizer>);
    }
  }
  static Optimizer make(const Params& over) {
    return Optimizer(two_groups(over, options_with<Options>(0.02)), options_with<Options>(0.01));
  }

  Params params = make_params();
  Params reference = copy_of(params);
  Optimizer optimizer = make(params);
  Optimizer torchs = make(reference);
};

void fused(torch::optim::Optimizer& optimizer) { fused_step(optimizer); }
void plain(torch::optim::Optimizer& optimizer) { optimizer.step(); }

}  // namespace

TEMPLATE_TEST_CASE("fuse: torch's optimizers go on as they were", "[optim]", Sgd, Adam, AdamW) {
  SideBySide<TestType> pair(GENERATE(0, 1, 5));
  auto& optimizer = pair.optimizer;
  REQUIRE(is_fused(optimizer));
  REQUIRE_FALSE(is_fused(pair.torchs));
  REQUIRE(&fuse_(optimizer) == &optimizer);  // Once more is no harm.
  const auto& options = optimizer.param_groups()[0].options();
  torch::optim::StepLR schedule(optimizer, 4, 0.5);
  torch::optim::StepLR torchs_schedule(pair.torchs, 4, 0.5);
  pair.agree(20, fused, [&] {
    schedule.step();
    torchs_schedule.step();
  });
  CHECK(&options == &optimizer.param_groups()[0].options());
}

TEMPLATE_TEST_CASE("fuse: checkpoints are torch's own, either way", "[optim]", Sgd, Adam, AdamW) {
  SideBySide<TestType> pair(GENERATE(0, 3));
  pair.agree(3, fused);
  auto copies = copy_of(pair.params);
  auto fresh = pair.make(copies);
  transfer(pair.optimizer, fresh);
  transfer(fresh, pair.optimizer);
  for (int step = 0; step < 5; ++step) {
    set_gradients({&pair.params, &copies});
    fused_step(pair.optimizer);
    fresh.step();
    REQUIRE(difference(pair.params, copies) <=
            kTolerance<typename SideBySide<TestType>::Optimizer>);
  }
}

TEMPLATE_TEST_CASE("unfuse: torch's own step takes over", "[optim]", Sgd, Adam, AdamW) {
  SideBySide<TestType> pair(GENERATE(0, 3));
  pair.agree(GENERATE(0, 4), fused);
  unfuse_(pair.optimizer);
  CHECK_FALSE(is_fused(pair.optimizer));
  CHECK(pair.optimizer.state().size() == pair.torchs.state().size());
  pair.agree(5, plain);
}

TEMPLATE_TEST_CASE("fuse: a skipped step changes no state", "[optim]", Sgd, Adam, AdamW) {
  using Optimizer = typename TestType::first_type;
  using Options = typename TestType::second_type;
  auto params = make_params();
  auto reference = copy_of(params);
  Optimizer optimizer(params, options_with<Options>(0.01));
  Optimizer torchs(reference, options_with<Options>(0.01));
  fuse_(optimizer);
  for (int step = 0; step < 20; ++step) {
    const bool skipped = step % 3 == 0;  // The first one too.
    set_gradients({&params, &reference});
    AmpStep amp_step;
    amp_step.found_inf = at::full({}, skipped ? 2.0 : 0.0);
    fused_step(optimizer, amp_step);
    if (!skipped) {
      torchs.step();
    }
    REQUIRE(difference(params, reference) <= kTolerance<Optimizer>);
  }
}

TEST_CASE("fuse: on the CPU torch's own step counts may be mixed in", "[optim]") {
  auto params = make_params();
  auto reference = copy_of(params);
  torch::optim::AdamW optimizer(params, torch::optim::AdamWOptions(0.01));
  torch::optim::AdamW torchs(reference, torch::optim::AdamWOptions(0.01));
  fuse_(optimizer);
  for (int step = 0; step < 12; ++step) {
    set_gradients({&params, &reference});
    if (step % 3 == 1) {
      optimizer.step();
    } else {
      fused_step(optimizer);
    }
    torchs.step();
    REQUIRE(difference(params, reference) <= 4.0);
  }
}

TEST_CASE("fuse: what it cannot carry is refused and left as it was", "[optim]") {
  auto params = make_params();
  torch::optim::RMSprop other(params);
  CHECK_FALSE(can_fuse(other));
  CHECK_THROWS_AS(fuse_(other), c10::TypeError);
  CHECK(message_of([&] { fuse_(other); }).find("got torch::optim::RMSprop") != std::string::npos);
  DerivedSgd derived(params, torch::optim::SGDOptions(0.1));
  CHECK_FALSE(can_fuse(derived));
  CHECK_THROWS_AS(fuse_(derived), c10::TypeError);
  torch::optim::Adam half(make_params(at::kHalf));
  CHECK_FALSE(can_fuse(half));
  CHECK_THROWS_AS(fuse_(half), c10::TypeError);
  for (const torch::optim::Optimizer* optimizer :
       std::initializer_list<const torch::optim::Optimizer*>{&other, &derived, &half}) {
    CHECK_FALSE(is_fused(*optimizer));
    CHECK(optimizer->state().empty());
  }
  CHECK_THROWS_AS(fused_step(derived), c10::ValueError);
}

TEST_CASE("fuse: our own optimizers need none of it", "[optim]") {
  fastamp::optim::AdamW optimizer(make_params());
  CHECK_NOTHROW(fuse_(optimizer));
  CHECK_FALSE(is_fused(optimizer));
}
