// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "optim/helpers.h"
#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/mse_loss.h>
#include <torch/optim/adamw.h>

#include <limits>
#include <sstream>
#include <string>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::GraphedStep;
using fastamp::GraphedStepOptions;
using fastamp::optim::AdamW;

namespace {

at::Tensor loss_of(const Params& params, const std::vector<at::Tensor>& inputs) {
  return at::mse_loss(inputs[0].mm(params[0]), inputs[1]);
}

std::vector<at::Tensor> batch() { return {at::randn({8, 4}), at::randn({8, 3})}; }

}  // namespace

TEST_CASE("GraphedStep: on the CPU it is the step written out", "[scaler]") {
  const int64_t parts = GENERATE(1, 2);
  const bool enabled = GENERATE(true, false);
  Params params{at::randn({4, 3}).requires_grad_(true)};
  auto reference = copy_of(params);
  AdamW optimizer(params, {1e-2});
  AdamW manual(reference, {1e-2});
  GradScaler scaler(cpu_options().init_scale(256.0).growth_interval(4).enabled(enabled));
  GradScaler manuals(cpu_options().init_scale(256.0).growth_interval(4).enabled(enabled));
  GraphedStep step(
      [&](const auto& inputs) { return loss_of(params, inputs); }, optimizer, scaler, batch(),
      GraphedStepOptions().dtype(at::kBFloat16).max_norm(0.5).clip_value(0.25).accumulation(parts));
  CHECK_FALSE(step.is_graphed());
  CHECK(equal(params, reference));
  for (int i = 0; i < 12; ++i) {
    auto inputs = batch();
    if (enabled && i % 5 == 3) {
      inputs[0][0][0] = std::numeric_limits<float>::infinity();
    }
    const auto loss = step(inputs);
    CHECK_FALSE(loss.requires_grad());
    manual.zero_grad();
    auto total = at::zeros({});
    for (int64_t part = 0; part < parts; ++part) {
      const fastamp::AutocastGuard region(c10::kCPU, at::kBFloat16);
      const auto rows = 8 / parts;
      const auto own = loss_of(reference, {inputs[0].narrow(0, part * rows, rows),
                                           inputs[1].narrow(0, part * rows, rows)});
      const auto mean = parts > 1 ? own / parts : own;
      total += mean.detach();
      manuals.scale(mean).backward();
    }
    REQUIRE(at::equal(loss.isnan(), total.isnan()));
    REQUIRE((total.isnan().item<bool>() || loss.equal(total)));
    manuals.clip_grad_norm_(manual, 0.5);
    manuals.clip_grad_value_(manual, 0.25);
    manuals.step(manual);
    manuals.update();
    REQUIRE(equal(params, reference));
    REQUIRE(scaler.get_scale() == manuals.get_scale());
  }
}

TEST_CASE("GraphedStep: what cannot work is refused", "[scaler]") {
  Params params{at::randn({4, 3}).requires_grad_(true)};
  const auto before = copy_of(params);
  GradScaler scaler(cpu_options());
  AdamW optimizer(params);
  const auto loss = [&](const auto& inputs) { return loss_of(params, inputs); };
  torch::optim::AdamW torchs(params);
  CHECK_THROWS_AS(GraphedStep(loss, torchs, scaler, batch()), c10::ValueError);
  CHECK_THROWS_AS(GraphedStep(loss, optimizer, scaler, {}), c10::ValueError);
  CHECK(error_text<c10::ValueError>([&] {
          GraphedStep(loss, optimizer, scaler, {at::Tensor(), batch()[1]});
        }) == "GraphedStep: expected sample input 0 to be a tensor, got an undefined one");
  CHECK_THROWS_AS(
      GraphedStep(loss, optimizer, scaler, batch(), GraphedStepOptions().accumulation(0)),
      c10::ValueError);
  CHECK_THROWS_AS(
      GraphedStep(loss, optimizer, scaler, batch(), GraphedStepOptions().accumulation(3)),
      c10::ValueError);
  GraphedStep step(loss, optimizer, scaler, batch());
  CHECK_THROWS_AS(step({batch()[0]}), c10::ValueError);
  CHECK_THROWS_AS(step({at::randn({7, 4}), at::randn({7, 3})}), c10::ValueError);
  CHECK_THROWS_AS(step({batch()[0], batch()[1].to(at::kDouble)}), c10::ValueError);
  CHECK(equal(params, before));
}

TEST_CASE("GraphedStep: the region is the device's, the dtype asked for, or none", "[scaler]") {
  struct Case {
    GraphedStepOptions options;
    bool enabled;
    at::ScalarType dtype;
  };
  const std::vector<Case> cases = {
      {GraphedStepOptions(), true, public_state().cpu_dtype},
      {GraphedStepOptions().dtype(at::kHalf), true, at::kHalf},
      {GraphedStepOptions().dtype(at::kBFloat16), true, at::kBFloat16},
      {GraphedStepOptions().autocast(false), false, at::kFloat},
  };
  Params params{at::randn({4, 3}).requires_grad_(true)};
  AdamW optimizer(params);
  GradScaler scaler(cpu_options());
  const fastamp::test::CapturedWarnings warnings;
  for (const auto& [options, enabled, dtype] : cases) {
    bool was_enabled = !enabled;
    at::ScalarType product = at::kInt;
    GraphedStep step(
        [&](const auto& inputs) {
          was_enabled = public_state().cpu_enabled;
          const auto result = inputs[0].mm(params[0]);
          product = result.scalar_type();
          return result.to(at::kFloat).sum();
        },
        optimizer, scaler, batch(), options);
    step(batch());
    CHECK(was_enabled == enabled);
    CHECK(product == dtype);
  }
  CHECK(warnings.texts().empty());
}

TEST_CASE("GraphedStep: options out of range are refused by name", "[scaler]") {
  Params params{at::randn({4, 3}).requires_grad_(true)};
  AdamW optimizer(params);
  GradScaler scaler(cpu_options());
  const auto text = [&](const GraphedStepOptions& options) {
    return error_text<c10::ValueError>([&] {
      GraphedStep([&](const auto& inputs) { return loss_of(params, inputs); }, optimizer, scaler,
                  batch(), options);
    });
  };
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kInt, at::ScalarType::Undefined}) {
    CHECK(text(GraphedStepOptions().dtype(dtype)).find("Say autocast(false) for a step without") !=
          std::string::npos);
  }
  CHECK(text(GraphedStepOptions().dtype(at::kHalf).autocast(false)) ==
        "GraphedStep: expected no dtype with autocast(false), got Half");
  CHECK(text(GraphedStepOptions().max_norm(-1.0)) == "GraphedStep: expected max_norm >= 0, got -1");
  CHECK_FALSE(text(GraphedStepOptions().max_norm(kNaN)).empty());
  CHECK(text(GraphedStepOptions().clip_value(-1.0)) ==
        "GraphedStep: expected clip_value >= 0, got -1");
  CHECK_FALSE(text(GraphedStepOptions().clip_value(kNaN)).empty());
  CHECK(text(GraphedStepOptions().accumulation(0)) ==
        "GraphedStep: expected accumulation >= 1, got 0");
  CHECK(text(GraphedStepOptions().warmup(0)) == "GraphedStep: expected warmup >= 1, got 0");
  CHECK(text(GraphedStepOptions().max_norm(0.0).clip_value(0.0).warmup(1)).empty());
}

TEST_CASE("GraphedStep: its options are printed in one line", "[scaler]") {
  std::ostringstream text;
  text << GraphedStepOptions() << '\n'
       << GraphedStepOptions().dtype(at::kHalf).max_norm(0.5).clip_value(2).accumulation(4) << '\n'
       << GraphedStepOptions().autocast(false).warmup(1);
  CHECK(text.str() ==
        "autocast on, accumulation 1, warmup 3\n"
        "autocast on, dtype Half, max_norm 0.5, clip_value 2, accumulation 4, warmup 3\n"
        "autocast off, accumulation 1, warmup 1");
}
