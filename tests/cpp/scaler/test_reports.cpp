// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/optim/sgd.h>

#include <ATen/ops/tensor.h>

#include <cmath>
#include <limits>
#include <sstream>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::unique_ptr<torch::optim::Optimizer> optimizer_over(const std::vector<at::Tensor>& params,
                                                        bool own) {
  if (own) {
    return std::make_unique<SGD>(params, SGDOptions(1.0));
  }
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(1.0));
}

void iterate(GradScaler& scaler, torch::optim::Optimizer& optimizer) {
  scaler.step(optimizer);
  scaler.update();
}

}  // namespace

TEST_CASE("overflow_report: names, shapes and counts of the last skipped step", "[scaler]") {
  const bool own = GENERATE(true, false);
  auto scaler = started(cpu_options().init_scale(8.0));
  CHECK_FALSE(scaler.overflow_report());
  CHECK(scaler.overflow_report().str() == "No step was skipped.");
  auto without = at::ones({3}).requires_grad_(true);
  auto bad = at::ones({2, 2}).requires_grad_(true);
  auto good = parameter_with(1.0F);
  const auto optimizer = optimizer_over({without, good, bad}, own);
  bad.mutable_grad() = at::tensor({1.0F, kInfinity, -kInfinity, std::nanf("")}).reshape({2, 2});
  iterate(scaler, *optimizer);
  bad.mutable_grad() = at::ones({2, 2});
  good.mutable_grad() = at::ones({2});
  iterate(scaler, *optimizer);  // A clean step leaves the report as it is.
  torch::OrderedDict<std::string, at::Tensor> names;
  names.insert("layer.weight", bad);
  const auto report = scaler.overflow_report(names);
  REQUIRE(report);
  CHECK(report.step == 0);
  CHECK(report.scale == 8.0);
  REQUIRE(report.gradients.size() == 1);
  const auto& gradient = report.gradients.front();
  CHECK(gradient.name == "layer.weight");
  CHECK(gradient.index == 2);
  CHECK(gradient.shape == std::vector<int64_t>{2, 2});
  CHECK(gradient.inf == 2);
  CHECK(gradient.nan == 1);
  CHECK(scaler.overflow_report().gradients.front().name == "parameter 2");
  CHECK(report.str().find("Step 0 was skipped at scale 8: 1 gradient") == 0);
}

TEST_CASE("history: scale, skip, norm and growth of the last iterations", "[scaler]") {
  const bool own = GENERATE(true, false);
  auto scaler = started(cpu_options().init_scale(8.0).growth_interval(2).history_size(3));
  auto parameter = parameter_with(0.0F, 4);
  const auto optimizer = optimizer_over({parameter}, own);
  for (const float gradient : {1.0F, kInfinity, 4.0F, 2.0F, 8.0F}) {
    parameter.mutable_grad() = at::full({4}, gradient);
    iterate(scaler, *optimizer);
  }
  const auto history = scaler.history();
  REQUIRE(history.size() == 3);
  CHECK(history[0].step == 2);
  CHECK(history[0].scale == 4.0);
  CHECK_FALSE(history[0].skipped);
  CHECK(history[0].norm == 2.0);  // Four times (4 / 4)^2, and the root.
  CHECK(history[0].growth_tracker == 1);
  CHECK(history[1].norm == 1.0);
  CHECK(history[1].growth_tracker == 0);
  CHECK(history[2].scale == 8.0);
  CHECK(history[2].step == 4);
}

TEST_CASE("history: skipped iterations are marked, and none are kept if so asked", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(8.0).history_size(GENERATE(0, 4)));
  auto parameter = parameter_with(kInfinity);
  SGD optimizer(std::vector<at::Tensor>{parameter}, SGDOptions(1.0));
  iterate(scaler, optimizer);
  const auto history = scaler.history();
  if (!history.empty()) {
    CHECK(history.front().skipped);
    CHECK(history.front().scale == 8.0);
  }
  CHECK_THROWS_AS(GradScaler(cpu_options().history_size(-1)), c10::ValueError);
}

TEST_CASE("history: the norm is that of all optimizers together", "[scaler]") {
  // With ranks to agree with, one optimizer of this one may lack gradients.
  const bool has_ranks = GENERATE(false, true);
  auto options = cpu_options().init_scale(1.0);
  auto scaler = started(has_ranks ? options.agreement([](const at::Tensor&) {}) : options);
  auto without = sgd({at::ones({2}).requires_grad_(true)});
  if (has_ranks) {
    scaler.step(without);
  }
  auto first = parameter_with(3.0F, 1);
  auto second = parameter_with(4.0F, 1);
  SGD left(std::vector<at::Tensor>{first}, SGDOptions(1.0));
  auto right = sgd({second});
  scaler.step(left);
  scaler.step(right);
  scaler.update();
  CHECK(scaler.history().front().norm == 5.0);
}

TEST_CASE("one warning says where to look when the scale falls below 1", "[scaler]") {
  const bool by_skips = GENERATE(false, true);
  auto scaler = started(cpu_options().init_scale(by_skips ? 1e30 : 2.0));
  auto parameter = parameter_with(kInfinity);
  SGD optimizer(std::vector<at::Tensor>{parameter}, SGDOptions(1.0));
  const fastamp::test::CapturedWarnings captured;
  for (int step = 0; step < 30; ++step) {
    parameter.mutable_grad() = at::full({2}, kInfinity);
    iterate(scaler, optimizer);
  }
  const auto& warnings = captured.texts();
  REQUIRE(warnings.size() == 1);
  CHECK(warnings.front().find("overflow_report") != std::string::npos);
  CHECK(warnings.front().find(by_skips ? "20 steps in a row" : "fell below 1") !=
        std::string::npos);
}

TEST_CASE("reports: streams show records, histories, reports and states", "[scaler]") {
  std::ostringstream text;
  text.precision(2);
  auto scaler = started(
      cpu_options().init_scale(16777216.0).min_scale(1.0).hysteresis(2).fast_growth_interval(5));
  auto optimizer = sgd({parameter_with(1.0F)});
  text << scaler.history() << '|' << scaler.overflow_report() << '|';
  iterate(scaler, optimizer);
  auto bad = sgd({parameter_with(kInfinity)});
  iterate(scaler, bad);
  auto state = *scaler.state();
  state.history[0].norm = 1.5;
  state.history[1].norm = std::nan("");
  text << state.history << '\n' << state << '\n' << fastamp::GradScalerState() << '\n' << 0.123;
  CHECK(text.str() ==
        "|No step was skipped.|"
        "step 0: stepped, scale 16777216, norm 1.5, growth_tracker 1\n"
        "step 1: skipped, scale 16777216, norm unknown, growth_tracker 0\n"
        "scale 16777216, growth_factor 2, backoff_factor 0.5, growth_interval 2000, "
        "growth_tracker 0, min_scale 1, hysteresis 2, hysteresis_tracker 1, "
        "fast_growth_interval 5, fast_growth_limit inf\n"
        "skipped in a row: 1\n"
        "history of steps 0 to 1\n"
        "Step 1 was skipped at scale 1.67772e+07: 1 gradient with inf or NaN.\n"
        "  parameter 0  [2]  inf 2  NaN 0\n"
        "scale 65536, growth_factor 2, backoff_factor 0.5, growth_interval 2000, "
        "growth_tracker 0\n"
        "0.12");
}
