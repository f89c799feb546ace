#include "helpers.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/mse_loss.h>
#include <torch/optim/adamw.h>

#include <limits>

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
    for (int64_t part = 0; part < parts; ++part) {
      const fastamp::AutocastGuard region(c10::kCPU, at::kBFloat16);
      const auto rows = 8 / parts;
      const auto own = loss_of(reference, {inputs[0].narrow(0, part * rows, rows),
                                           inputs[1].narrow(0, part * rows, rows)});
      manuals.scale(parts > 1 ? own / parts : own).backward();
    }
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
