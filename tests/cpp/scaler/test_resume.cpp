// SPDX-License-Identifier: Apache-2.0
// Training that stops at any step, among overflows, and goes on from torch::save's archives.

#include "helpers.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full_like.h>

#include <limits>
#include <random>
#include <type_traits>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::optim::AdamW;
using fastamp::optim::AdamWOptions;
using fastamp::optim::AdamWParamState;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;
using fastamp::optim::SGDParamState;

namespace {

constexpr unsigned kSteps = 40;

template <typename Optimizer>
Optimizer make(const Params& params) {
  if constexpr (std::is_same_v<Optimizer, SGD>) {
    return SGD(params, SGDOptions(0.05).momentum(0.9).dampening(0.3).weight_decay(0.01));
  } else {
    return AdamW(params, AdamWOptions(0.01).amsgrad(true));
  }
}

std::vector<at::Tensor> tensors_of(const SGDParamState& state) {
  return {state.momentum_buffer(), state.steps(), state.master()};
}

std::vector<at::Tensor> tensors_of(const AdamWParamState& state) {
  return {state.steps(), state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(),
          state.master()};
}

GradScaler make_scaler() {
  return started(cpu_options().init_scale(4096.0).growth_interval(3).hysteresis(2));
}

template <typename Optimizer>
struct Training {
  using State = std::conditional_t<std::is_same_v<Optimizer, SGD>, SGDParamState, AdamWParamState>;

  explicit Training(const Params& start)
      : params(copy_of(start)), optimizer(make<Optimizer>(params)) {}

  /// One iteration, whose gradients depend on its number and the scale alone; true if skipped.
  bool step(unsigned number) {
    std::mt19937 random(number);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(number);
    const double scale = scaler.get_scale();
    for (auto& param : params) {
      const auto gradient = at::randn(param.sizes(), generator).mul(scale).to(param.scalar_type());
      param.mutable_grad() = random() % 8 == 0 ? at::Tensor() : gradient;
    }
    const double last = random() % 3 == 0 ? std::numeric_limits<double>::infinity() : scale;
    params.back().mutable_grad() = at::full_like(params.back().detach(), last);
    if (random() % 2 == 0) {
      scaler.clip_grad_norm_(optimizer, 1.0);
    }
    scaler.step(optimizer);
    scaler.update();
    return scaler.step_was_skipped();
  }

  /// What a new process would have: everything from archives, nothing else.
  Training resumed() const {
    Params loaded;
    transfer(params, loaded);
    Training other(loaded);
    transfer(optimizer, other.optimizer);
    transfer(scaler, other.scaler);
    return other;
  }

  std::vector<at::Tensor> state_of(const at::Tensor& param) const {
    const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
    return found == optimizer.state().end() ? std::vector<at::Tensor>{}
                                            : tensors_of(static_cast<State&>(*found->second));
  }

  Params params;
  Optimizer optimizer;
  GradScaler scaler = make_scaler();
};

template <typename Optimizer>
void check_equal(const Training<Optimizer>& left, const Training<Optimizer>& right) {
  REQUIRE(equal(left.params, right.params));
  REQUIRE(left.scaler.get_scale() == right.scaler.get_scale());
  REQUIRE(left.scaler.state()->growth_tracker == right.scaler.state()->growth_tracker);
  REQUIRE(left.scaler.state()->hysteresis_tracker == right.scaler.state()->hysteresis_tracker);
  for (std::size_t i = 0; i < left.params.size(); ++i) {
    const auto one = left.state_of(left.params[i]);
    const auto other = right.state_of(right.params[i]);
    REQUIRE(one.size() == other.size());
    for (std::size_t j = 0; j < one.size(); ++j) {
      REQUIRE(one[j].defined() == other[j].defined());
      REQUIRE((!one[j].defined() || one[j].equal(other[j])));
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("training resumed at a random step among overflows goes on identically",
                   "[scaler]", SGD, AdamW) {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto seed = GENERATE(range(0U, 8U));
  std::mt19937 random(seed);
  const auto stop = seed == 0 ? 0U : static_cast<unsigned>(random()) % kSteps;
  const unsigned first = seed * 1000;
  Training<TestType> whole(make_params(dtype));
  int skips = 0;
  for (unsigned number = 0; number < stop; ++number) {
    skips += whole.step(first + number) ? 1 : 0;
  }
  auto resumed = whole.resumed();
  for (unsigned number = stop; number < kSteps + 10; ++number) {
    const bool skipped = whole.step(first + number);
    skips += skipped ? 1 : 0;
    REQUIRE(resumed.step(first + number) == skipped);
    check_equal(whole, resumed);
  }
  CHECK(skips > 5);
}
