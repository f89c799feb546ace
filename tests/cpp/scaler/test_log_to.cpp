// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/graphed_step.h>
#include <fastamp/scaler/log_to.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::log_to;
using fastamp::LoggedStep;
using fastamp::optim::SGD;
using fastamp::optim::SGDOptions;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void iterate(GradScaler& scaler, torch::optim::Optimizer& optimizer) {
  scaler.step(optimizer);
  scaler.update();
}

}  // namespace

TEST_CASE("log_to: each row is what the iteration did, and what history() shows", "[scaler]") {
  const bool own = GENERATE(true, false);
  auto scaler = started(cpu_options().init_scale(8.0).growth_interval(2).history_size(3));
  auto first = parameter_with(0.0F, 4);
  auto second = parameter_with(0.0F, 4);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (own) {
    optimizer = std::make_unique<SGD>(std::vector<at::Tensor>{first, second}, SGDOptions(1.0));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{first, second},
                                                    torch::optim::SGDOptions(1.0));
  }
  std::vector<LoggedStep> rows;
  auto log = log_to(scaler, [&](const LoggedStep& row) { rows.push_back(row); });
  for (const float gradient : {1.0F, kInfinity, 4.0F, 0.0F, 8.0F, kInfinity}) {
    first.mutable_grad() = at::full({4}, gradient);
    second.mutable_grad() = at::tensor({0.0F, 1.0F, 0.0F, gradient - gradient});
    iterate(scaler, *optimizer);
  }
  REQUIRE(rows.size() == 6);
  const auto history = scaler.history();
  for (std::size_t i = 0; i < history.size(); ++i) {
    CHECK(rows[3 + i].step == history[i].step);
    CHECK(rows[3 + i].scale == history[i].scale);
    CHECK(rows[3 + i].skipped == history[i].skipped);
    CHECK(rows[3 + i].growth_tracker == history[i].growth_tracker);
    if (!history[i].skipped) {
      CHECK(rows[3 + i].norm == history[i].norm);
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool bad = i == 1 || i == 5;
    CHECK(rows[i].step == static_cast<std::int64_t>(i));
    CHECK(rows[i].skipped == bad);
    CHECK(rows[i].overflows == (bad ? 5 : 0));  // Four inf and one inf - inf.
  }
  CHECK(rows[0].scale == 8.0);
  CHECK(rows[2].scale == 4.0);
  CHECK(rows[0].norm == Approx(std::sqrt(5.0) / 8.0));
  CHECK(rows[0].underflows == std::optional<std::int64_t>(3));
  CHECK(rows[1].underflows == std::optional<std::int64_t>(2));
  CHECK(rows[2].underflows == std::optional<std::int64_t>(3));
  CHECK_FALSE(rows[3].underflows);  // Not counted at iteration 3.
  CHECK(rows[4].underflows == std::optional<std::int64_t>(3));
}

TEST_CASE("log_to: casts are those since the row before", "[scaler]") {
  auto scaler = started(cpu_options());
  auto parameter = parameter_with(1.0F);
  SGD optimizer({parameter}, SGDOptions(1.0));
  std::vector<LoggedStep> rows;
  std::vector<LoggedStep> without;
  const auto keep = [](std::vector<LoggedStep>& to) {
    return [&to](const LoggedStep& row) { to.push_back(row); };
  };
  const auto log = log_to(scaler, keep(rows));
  const auto other = log_to(scaler, keep(without), /*casts=*/false);
  const auto x = at::ones({4, 4});
  for (const int products : {1, 0, 2}) {
    for (int i = 0; i < products; ++i) {
      const fastamp::AutocastGuard region(c10::kCPU, at::kBFloat16);
      at::mm(x, x.clone());
    }
    iterate(scaler, optimizer);
  }
  REQUIRE(rows.size() == 3);
  REQUIRE(without.size() == 3);
  CHECK(rows[0].casts.casts() == 2);
  CHECK(rows[0].casts.cast_bytes == 2 * 16 * 2);
  CHECK(rows[1].casts.casts() == 0);
  CHECK(rows[2].casts.casts() == 4);
  CHECK(without[2].casts.casts() == 0);
  std::ostringstream text;
  text << rows[0];
  CHECK(text.str().find("step 0: stepped, scale 65536, norm") == 0);
  CHECK(text.str().find("overflows 0, underflows 0, casts 2 (64 bytes)") != std::string::npos);
}

TEST_CASE("log_to: it begins, ends and moves when asked to, and outlives the scaler", "[scaler]") {
  auto parameter = parameter_with(1.0F);
  SGD optimizer({parameter}, SGDOptions(1.0));
  std::vector<std::int64_t> steps;
  std::optional<fastamp::StepLog> log;
  {
    auto scaler = started(cpu_options());
    iterate(scaler, optimizer);
    log.emplace(log_to(scaler, [&](const LoggedStep& row) { steps.push_back(row.step); }));
    iterate(scaler, optimizer);
    scaler.update(4.0);  // Ends no iteration.
    auto moved = std::move(scaler);
    iterate(moved, optimizer);
    CHECK(steps == std::vector<std::int64_t>{1, 2});
    {
      auto second = log_to(moved, [&](const LoggedStep& row) { steps.push_back(-row.step); });
      *log = std::move(second);  // The first one ends.
    }
    iterate(moved, optimizer);
    CHECK(steps.back() == -3);
    log->flush();
    moved.load_state(moved.state());
    iterate(moved, optimizer);
    CHECK(steps == std::vector<std::int64_t>{1, 2, -3, -4});
    log->release();
    iterate(moved, optimizer);
    log->release();
  }
  CHECK(steps.size() == 4);
}

TEST_CASE("log_to: a callback may ask the scaler, end the log, and log to others", "[scaler]") {
  auto scaler = started(cpu_options());
  auto parameter = parameter_with(1.0F);
  SGD optimizer({parameter}, SGDOptions(1.0));
  std::vector<std::int64_t> steps;
  std::optional<fastamp::StepLog> log;
  std::optional<fastamp::StepLog> next;
  log.emplace(log_to(scaler, [&](const LoggedStep& row) {
    CHECK(scaler.get_scale_async() == scaler.get_scale());
    CHECK_FALSE(scaler.step_was_skipped());
    steps.push_back(row.step);
    if (row.step == 1) {
      next.emplace(log_to(scaler, [&](const LoggedStep& r) { steps.push_back(10 + r.step); }));
      log->release();
    }
  }));
  for (int i = 0; i < 3; ++i) {
    iterate(scaler, optimizer);
  }
  CHECK(steps == std::vector<std::int64_t>{0, 1, 12});
}

TEST_CASE("log_to: a callback that throws ends the log and not the training", "[scaler]") {
  auto scaler = started(cpu_options());
  auto parameter = parameter_with(1.0F);
  SGD optimizer({parameter}, SGDOptions(1.0));
  int calls = 0;
  auto log = log_to(scaler, [&](const LoggedStep& /*row*/) {
    ++calls;
    throw std::runtime_error("disk full");
  });
  const CapturedWarnings warnings;
  iterate(scaler, optimizer);
  iterate(scaler, optimizer);
  log.release();
  CHECK(calls == 1);
  REQUIRE(warnings.texts().size() == 1);
  CHECK(warnings.has("log_to: the callback threw at step 0 (disk full)"));
  CHECK(parameter[0].item<float>() != 1.0F);
}

TEST_CASE("log_to: a graphed step logs, a disabled scaler has nothing to log", "[scaler]") {
  GradScaler scaler(cpu_options().init_scale(4.0));
  GradScaler disabled(cpu_options().enabled(false));
  auto parameter = parameter_with(1.0F);
  SGD optimizer({parameter}, SGDOptions(0.1));
  std::vector<LoggedStep> rows;
  const auto keep = [&](const LoggedStep& row) { rows.push_back(row); };
  const auto log = log_to(scaler, keep);
  const auto nothing = log_to(disabled, keep);
  const auto loss = [&](const std::vector<at::Tensor>& inputs) {
    return (parameter * inputs[0]).sum();
  };
  fastamp::GraphedStep step(loss, optimizer, scaler, {at::ones({2})});
  step({at::ones({2})});
  step({at::full({2}, kInfinity)});
  iterate(disabled, optimizer);
  REQUIRE(rows.size() == 2);
  CHECK_FALSE(rows[0].skipped);
  CHECK(rows[1].skipped);
  CHECK(rows[1].overflows == 2);
}

TEST_CASE("log_to: bad arguments are refused", "[scaler]") {
  auto scaler = started(cpu_options());
  CHECK(error_text<c10::ValueError>([&] { (void)log_to(scaler, nullptr); }) ==
        "log_to: expected a callback, got an empty function");
  auto without = started(cpu_options().history_size(0));
  const auto callback = [](const LoggedStep&) {};
  CHECK(error_text<c10::ValueError>([&] { (void)log_to(without, callback); }) ==
        "log_to: expected a scaler with history_size above 0, got 0");
  const auto moved = std::move(scaler);
  // NOLINTNEXTLINE(bugprone-use-after-move): what is tested
  CHECK(error_text<c10::Error>([&] {
          (void)log_to(scaler, callback);
        }).find("log_to: expected a scaler, got one that was moved from") == 0);
}
