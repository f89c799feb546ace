// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/on_skip.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::SkippedStep;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void iterate(GradScaler& scaler, torch::optim::Optimizer& optimizer, bool overflow) {
  for (auto& parameter : optimizer.param_groups().front().params()) {
    parameter.mutable_grad() = at::full_like(parameter, overflow ? kInfinity : 1.0F);
  }
  scaler.step(optimizer);
  scaler.update();
}

}  // namespace

TEST_CASE("on_skip: a callback gets the optimizer and the iteration's row", "[scaler]") {
  const bool takes_amp_step = GENERATE(false, true);
  auto parameter = parameter_with(1.0F);
  auto plain = sgd({parameter});
  fastamp::optim::SGD fused({parameter}, 0.1);
  torch::optim::Optimizer& optimizer =
      takes_amp_step ? static_cast<torch::optim::Optimizer&>(fused) : plain;
  std::vector<SkippedStep> notified;
  auto scaler = started(cpu_options().init_scale(8.0).on_skip(
      [&](const SkippedStep& step) { notified.push_back(step); }));
  for (const bool overflow : {false, true, false, true}) {
    iterate(scaler, optimizer, overflow);
  }
  REQUIRE(notified.size() == 2);
  const auto history = scaler.history();
  for (const std::size_t i : {0U, 1U}) {
    const auto& row = history.at(2 * i + 1);
    CHECK(notified[i].optimizer == &optimizer);
    CHECK(notified[i].step == row.step);
    CHECK(notified[i].scale == row.scale);
    CHECK(notified[i].skipped);
    CHECK((notified[i].norm == row.norm || std::isnan(row.norm)));
    CHECK(notified[i].growth_tracker == row.growth_tracker);
  }
}

TEST_CASE("on_skip: without a history the row has what is known", "[scaler]") {
  auto parameter = parameter_with(1.0F);
  auto optimizer = sgd({parameter});
  std::optional<SkippedStep> notified;
  auto scaler = started(cpu_options().init_scale(8.0).history_size(0));
  scaler.register_on_skip([&](const SkippedStep& step) { notified = step; }, /*wait=*/true);
  iterate(scaler, optimizer, false);
  CHECK_FALSE(notified.has_value());
  iterate(scaler, optimizer, true);
  REQUIRE(notified.has_value());
  CHECK(notified->step == 1);
  CHECK(notified->scale == 8.0);
  CHECK(std::isnan(notified->norm));
}

TEST_CASE("on_skip: each optimizer that skipped is reported, in order", "[scaler]") {
  std::vector<at::Tensor> parameters;
  std::vector<torch::optim::SGD> optimizers;
  for (const float gradient : {kInfinity, 1.0F, kInfinity}) {
    parameters.push_back(parameter_with(gradient));
    optimizers.push_back(sgd({parameters.back()}));
  }
  std::vector<const torch::optim::Optimizer*> notified;
  auto scaler = started(cpu_options());
  scaler.register_on_skip([&](const SkippedStep& step) { notified.push_back(step.optimizer); });
  for (auto& optimizer : optimizers) {
    scaler.step(optimizer);
  }
  CHECK(notified.empty());
  scaler.update();
  CHECK(notified == std::vector<const torch::optim::Optimizer*>{&optimizers[0], &optimizers[2]});
}

TEST_CASE("on_skip: what a callback makes known is reported after it", "[scaler]") {
  auto parameter = parameter_with(1.0F);
  auto optimizer = sgd({parameter});
  auto scaler = started(cpu_options().init_scale(16.0));
  std::vector<double> order;
  scaler.register_on_skip([&](const SkippedStep& step) {
    order.push_back(step.scale);
    if (step.step == 0) {
      iterate(scaler, optimizer, true);
      order.push_back(0.0);
    }
  });
  iterate(scaler, optimizer, true);
  CHECK(order == std::vector<double>{16.0, 0.0, 8.0});
  CHECK(scaler.get_scale() == 4.0);
}

TEST_CASE("on_skip: what a callback throws comes out when update() is done", "[scaler]") {
  auto parameter = parameter_with(1.0F);
  auto optimizer = sgd({parameter});
  auto scaler = started(cpu_options().init_scale(16.0));
  std::vector<int64_t> after;
  scaler.register_on_skip([](const SkippedStep& step) {
    if (step.step == 1) {
      throw std::runtime_error("too often");
    }
  });
  scaler.register_on_skip([&](const SkippedStep& step) { after.push_back(step.step); });
  iterate(scaler, optimizer, true);
  CHECK_THROWS_AS(iterate(scaler, optimizer, true), std::runtime_error);
  CHECK(scaler.get_scale() == 4.0);
  iterate(scaler, optimizer, true);
  CHECK(after == std::vector<int64_t>{0, 2});
}

TEST_CASE("on_skip: callbacks can be removed, also within a call", "[scaler]") {
  auto parameter = parameter_with(1.0F);
  auto optimizer = sgd({parameter});
  auto scaler = started(cpu_options());
  std::vector<int> notified;
  std::vector<fastamp::SkipHandle> handles;
  handles.push_back(scaler.register_on_skip([&](const SkippedStep& /*step*/) {
    notified.push_back(1);
    handles[0].remove();
    handles[1].remove();
  }));
  handles.push_back(
      scaler.register_on_skip([&](const SkippedStep& /*step*/) { notified.push_back(2); }));
  handles.push_back(
      scaler.register_on_skip([&](const SkippedStep& /*step*/) { notified.push_back(3); }));
  iterate(scaler, optimizer, true);
  auto moved = std::move(scaler);
  iterate(moved, optimizer, true);
  CHECK(notified == std::vector<int>{1, 3, 3});
  handles[2].remove();
  handles[2].remove();
  iterate(moved, optimizer, true);
  CHECK(notified.size() == 3);
  moved = started(cpu_options());
  CHECK_NOTHROW(handles[1].remove());
}

TEST_CASE("on_skip: a disabled scaler calls nobody, and empty functions are refused", "[scaler]") {
  auto parameter = parameter_with(kInfinity);
  auto optimizer = sgd({parameter});
  GradScaler disabled(cpu_options().enabled(false));
  disabled.register_on_skip([](const SkippedStep& /*step*/) { FAIL("called"); });
  disabled.step(optimizer);
  disabled.update();
  CHECK(error_text<c10::ValueError>([&] { disabled.register_on_skip(nullptr); }) ==
        "register_on_skip: expected a callback, got an empty function");
}
