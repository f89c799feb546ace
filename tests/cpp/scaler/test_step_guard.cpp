// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/log_to.h>
#include <fastamp/scaler/step_guard.h>

#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::SkippedStep;
using fastamp::SpikeOf;
using fastamp::StepGuard;
using fastamp::StepGuardOptions;
using torch::optim::Optimizer;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

at::Tensor parameter() { return at::linspace(-1, 1, 7).requires_grad_(true); }

/// Optimizers of every way to be stepped.
std::unique_ptr<Optimizer> make(const std::string& kind, const at::Tensor& weight) {
  const std::vector<at::Tensor> weights{weight};
  if (kind == "torch SGD") {
    return std::make_unique<torch::optim::SGD>(weights,
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  if (kind == "fastamp Adam") {
    return std::make_unique<fastamp::optim::Adam>(weights, 0.01);
  }
  auto adam = std::make_unique<torch::optim::Adam>(weights, torch::optim::AdamOptions(0.01));
  if (kind == "fused Adam") {
    fastamp::optim::fuse_(*adam);
  }
  return adam;
}

void set_gradient(Optimizer& optimizer, float spoilt_by = 0.0F) {
  auto& weight = optimizer.param_groups().front().params().front();
  auto gradient = at::linspace(0.5, 2, 7);
  if (spoilt_by != 0.0F) {
    gradient[3] = spoilt_by;
  }
  weight.mutable_grad() = std::move(gradient);
}

at::Tensor weight_of(const Optimizer& optimizer) {
  return optimizer.param_groups().front().params().front().detach();
}

/// Everything that a step writes, as its archive has it.
std::string bytes_of(const Optimizer& optimizer) {
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(stream);
  return stream.str();
}

void step_of_norm(StepGuard& guard, Optimizer& optimizer, double norm) {
  auto& weight = optimizer.param_groups().front().params().front();
  weight.mutable_grad() = at::full_like(weight, norm / std::sqrt(7.0));
  guard.step();
}

const auto kKinds = {"torch SGD", "torch Adam", "fused Adam", "fastamp Adam"};

}  // namespace

TEST_CASE("step_guard: finite steps have the bits of steps without it", "[scaler]") {
  const std::string kind = GENERATE(values(kKinds));
  const auto guarded = make(kind, parameter());
  const auto plain = make(kind, parameter());
  StepGuard guard(*guarded);
  for (int i = 0; i < 4; ++i) {
    set_gradient(*guarded);
    set_gradient(*plain);
    guard.step();
    if (kind == "fused Adam") {
      fastamp::optim::fused_step(*plain);
    } else {
      plain->step();
    }
    CHECK(at::equal(weight_of(*guarded), weight_of(*plain)));
  }
  CHECK_FALSE(guard.step_was_skipped());
  CHECK(guard.history().size() == 4);
  CHECK_FALSE(guard.overflow_report());
}

TEST_CASE("step_guard: a step with one bad element changes no bit", "[scaler]") {
  const std::string kind = GENERATE(values(kKinds));
  const float value = GENERATE(values({kNaN, kInfinity, -kInfinity}));
  CAPTURE(kind, value);
  const auto optimizer = make(kind, parameter());
  std::vector<std::int64_t> skipped_steps;
  StepGuard guard(*optimizer, StepGuardOptions().on_skip([&](const SkippedStep& step) {
    CHECK(step.optimizer == optimizer.get());
    skipped_steps.push_back(step.step);
  }));
  set_gradient(*optimizer);
  guard.step();
  const auto before = weight_of(*optimizer).clone();
  const auto state = bytes_of(*optimizer);
  set_gradient(*optimizer, value);
  guard.step();
  CHECK(at::equal(before, weight_of(*optimizer)));
  CHECK(state == bytes_of(*optimizer));
  CHECK(guard.step_was_skipped());
  CHECK(guard.skipped_in_a_row() == 1);
  CHECK(skipped_steps == std::vector<std::int64_t>{1});
  const auto report = guard.overflow_report({{"weight", optimizer->param_groups()[0].params()[0]}});
  REQUIRE(report.gradients.size() == 1);
  CHECK(report.gradients[0].name == "weight");
  CHECK(report.gradients[0].inf + report.gradients[0].nan == 1);
  set_gradient(*optimizer);
  guard.step();
  CHECK_FALSE(guard.step_was_skipped());
  CHECK_FALSE(at::equal(before, weight_of(*optimizer)));
}

TEST_CASE("step_guard: clipping is put off to the step", "[scaler]") {
  const std::string kind = GENERATE(values(kKinds));
  const double norm_type = GENERATE(2.0, std::numeric_limits<double>::infinity());
  const auto optimizer = make(kind, parameter());
  const auto plain = make(kind, parameter());
  StepGuard guard(*optimizer);
  set_gradient(*optimizer);
  set_gradient(*plain);
  auto& gradient = plain->param_groups()[0].params()[0].mutable_grad();
  const auto norm = guard.clip_grad_norm_(0.5, norm_type);
  const double wanted = std::isinf(norm_type) ? 2.0 : gradient.norm().item<double>();
  CHECK(norm.item<double>() == Approx(wanted));
  gradient.mul_(0.5 / (wanted + 1e-6));
  guard.step();
  if (kind == "fused Adam") {
    fastamp::optim::fused_step(*plain);
  } else {
    plain->step();
  }
  CHECK(at::allclose(weight_of(*optimizer), weight_of(*plain), 1e-5, 1e-6));
  set_gradient(*optimizer, kNaN);
  CHECK_THROWS_AS(guard.clip_grad_norm_(0.5, norm_type, true), c10::Error);
}

TEST_CASE("step_guard: a clip of an iteration that was broken off is forgotten", "[scaler]") {
  const std::string kind = GENERATE(values(kKinds));
  const auto optimizer = make(kind, parameter());
  const auto plain = make(kind, parameter());
  StepGuard guard(*optimizer);
  set_gradient(*optimizer, kNaN);
  guard.clip_grad_norm_(0.1);
  set_gradient(*optimizer);
  StepGuard other(*plain);
  set_gradient(*plain);
  guard.step();
  other.step();
  CHECK_FALSE(guard.step_was_skipped());
  CHECK(at::equal(weight_of(*optimizer), weight_of(*plain)));
}

TEST_CASE("step_guard: closures, losses and too many skips", "[scaler]") {
  const std::string kind = GENERATE(values(kKinds));
  const auto optimizer = make(kind, parameter());
  StepGuard guard(*optimizer, StepGuardOptions().max_consecutive(1));
  const auto loss = guard.step([&] {
    CHECK(at::GradMode::is_enabled());
    set_gradient(*optimizer);
    return at::ones({});
  });
  CHECK(loss.value_or(at::zeros({})).item<float>() == 1.0F);
  const auto before = weight_of(*optimizer).clone();
  set_gradient(*optimizer);
  guard.check_loss(at::full({}, kNaN));
  guard.step();
  CHECK(guard.step_was_skipped());
  CHECK(guard.overflow_report().gradients.empty());
  CHECK(at::equal(before, weight_of(*optimizer)));
  set_gradient(*optimizer, kNaN);
  CHECK_THROWS_WITH(guard.step(), Catch::Contains("at most 1 skipped steps in a row, got 2") &&
                                      Catch::Contains("parameter 0"));
  CHECK(at::equal(before, weight_of(*optimizer)));
}

TEST_CASE("step_guard: a rank that learns of another's NaN skips, and reports none", "[scaler]") {
  const std::string kind = GENERATE(values(kKinds));
  const auto optimizer = make(kind, parameter());
  int calls = 0;
  StepGuard guard(*optimizer, StepGuardOptions().agreement([&](const at::Tensor& flag) {
    if (calls++ == 1) {
      flag.fill_(1.0F);
    }
  }));
  set_gradient(*optimizer, kNaN);
  guard.step();
  set_gradient(*optimizer);
  guard.clip_grad_norm_(1.0);
  const auto before = weight_of(*optimizer).clone();
  guard.step();
  CHECK(calls == 2);
  CHECK(guard.skipped_in_a_row() == 2);
  CHECK(at::equal(before, weight_of(*optimizer)));
  CHECK(guard.overflow_report().step == 1);
  CHECK(guard.overflow_report().gradients.empty());
}

TEST_CASE("step_guard: spikes, and a state that goes on", "[scaler]") {
  const auto of = GENERATE(SpikeOf::kMedian, SpikeOf::kMean);
  const auto optimizer = make("fastamp Adam", parameter());
  const auto options =
      StepGuardOptions().spike(fastamp::SpikeOptions{.factor = 3.0, .of = of, .window = 4});
  StepGuard guard(*optimizer, options);
  for (const double norm : {1.0, 2.0, 50.0, 1.0, 2.0}) {
    step_of_norm(guard, *optimizer, norm);
    CHECK_FALSE(guard.step_was_skipped());  // The first four are none.
  }
  std::stringstream stream;
  torch::serialize::OutputArchive archive;
  archive << guard;
  archive.save_to(stream);
  StepGuard other(*optimizer, options);
  torch::serialize::InputArchive stored;
  stored.load_from(stream);
  stored >> other;
  for (auto* each : {&guard, &other}) {
    step_of_norm(*each, *optimizer, 1000.0);
    CHECK(each->step_was_skipped());
    CHECK(each->history().back().step == 5);
    CHECK(each->history().back().norm == Approx(1000.0));
  }
  auto bad = other.state();
  bad.spike = fastamp::SpikeState{.norms = {-1.0}, .count = 1};
  CHECK_THROWS_AS(other.load_state(bad), c10::ValueError);
}

TEST_CASE("step_guard: rows are logged", "[scaler]") {
  const auto optimizer = make("fastamp Adam", parameter());
  StepGuard guard(*optimizer);
  std::vector<fastamp::LoggedStep> rows;
  auto log = fastamp::log_to(guard, [&](const fastamp::LoggedStep& row) { rows.push_back(row); });
  set_gradient(*optimizer);
  guard.step();
  set_gradient(*optimizer, kInfinity);
  guard.step();
  REQUIRE(rows.size() == 2);
  CHECK(rows[1].skipped);
  CHECK(rows[1].overflows == 1);
}

TEST_CASE("step_guard: what is out of range is refused", "[scaler]") {
  const auto optimizer = make("torch SGD", parameter());
  const auto refused = [&](const StepGuardOptions& options) {
    CHECK_THROWS_AS(StepGuard(*optimizer, options), c10::ValueError);
  };
  refused(StepGuardOptions().max_consecutive(-1));
  refused(StepGuardOptions().history_size(-1));
  refused(StepGuardOptions().spike(fastamp::SpikeOptions{.factor = 1.0}));
  refused(StepGuardOptions().spike(fastamp::SpikeOptions{.factor = kNaN}));
  refused(StepGuardOptions().spike(fastamp::SpikeOptions{.window = 1}));
  torch::optim::LBFGS lbfgs({parameter()});
  CHECK_THROWS_AS(StepGuard(lbfgs), c10::ValueError);
  StepGuard guard(*optimizer);
  CHECK_THROWS_AS(guard.check_loss(at::Tensor()), c10::ValueError);
  CHECK_THROWS_AS(guard.check_loss(at::ones({2})), c10::ValueError);
  CHECK_THROWS_AS(guard.check_loss(at::ones({}, at::kLong)), c10::ValueError);
  CHECK_THROWS_AS(guard.register_on_skip(nullptr), c10::ValueError);
  auto state = guard.state();
  state.skipped_in_a_row = -1;
  CHECK_THROWS_AS(guard.load_state(state), c10::ValueError);
}
