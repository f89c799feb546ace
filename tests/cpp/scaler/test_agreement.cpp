// SPDX-License-Identifier: Apache-2.0
// Overflows agreed on between ranks: two threads that share a c10d process group.

#include "helpers.h"
#include "support/catch.h"
#include "support/threads.h"
#include "support/warnings.h"
#include "thread_group.h"

#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/process_group.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

using Value = std::optional<float>;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using Make = std::function<Optimizer(const std::vector<at::Tensor>&)>;

/// Each row: the gradient of rank 0 and of rank 1, or none.
const std::vector<std::array<Value, kRanks>> kGradients = {
    {1.0F, 1.0F},         {kInfinity, 1.0F},         {1.0F, kNaN}, {kNaN, kInfinity},
    {std::nullopt, 2.0F}, {kInfinity, std::nullopt}, {1.0F, 1.0F},
};
const std::vector<bool> kSkipped = {false, true, true, true, false, true, false};

Optimizer of_torch(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.5));
}

Optimizer fused(const std::vector<at::Tensor>& parameters) {
  auto optimizer = of_torch(parameters);
  fastamp::optim::fuse_(*optimizer);
  return optimizer;
}

Optimizer own(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<fastamp::optim::SGD>(parameters, fastamp::optim::SGDOptions(0.5));
}

struct Iteration {
  bool skipped;
  double scale;
  float weight;
};

using Before = std::function<void(GradScaler&, torch::optim::Optimizer&)>;

std::vector<Iteration> train(int rank, const fastamp::FlagAgreement& agreement, const Make& make,
                             const Before& before_step) {
  const auto parameter = at::ones({3}).requires_grad_(true);
  const auto optimizer = make({parameter});
  auto scaler = started(cpu_options().init_scale(16.0).growth_interval(2).agreement(agreement));
  std::vector<Iteration> trace;
  for (const auto& row : kGradients) {
    const auto value = row.at(static_cast<std::size_t>(rank));
    parameter.mutable_grad() = value ? at::full({3}, *value) : at::Tensor();
    before_step(scaler, *optimizer);
    scaler.step(*optimizer);
    scaler.update();
    trace.push_back({scaler.step_was_skipped(), scaler.get_scale(), parameter[0].item<float>()});
  }
  return trace;
}

void nothing(GradScaler& /*scaler*/, torch::optim::Optimizer& /*optimizer*/) {}

void clip(GradScaler& scaler, torch::optim::Optimizer& optimizer) {
  scaler.clip_grad_norm_(optimizer, 1e6);
}

void unscale_and_clip(GradScaler& scaler, torch::optim::Optimizer& optimizer) {
  scaler.unscale_(optimizer);
  scaler.clip_grad_norm_(optimizer, 1e6);
  scaler.clip_grad_value_(optimizer, 1e6);
}

}  // namespace

TEST_CASE("agreement: if one rank overflows all skip and keep equal scales", "[scaler]") {
  const auto [name, make] = GENERATE(
      table<const char*, Make>({{"torch's", of_torch}, {"fused", fused}, {"fastamp's", own}}));
  const auto [how, before] = GENERATE(table<const char*, Before>(
      {{"step alone", nothing}, {"clip", clip}, {"unscale and clip", unscale_and_clip}}));
  CAPTURE(name, how);
  RankMeeting meeting;
  std::array<std::vector<Iteration>, kRanks> traces;
  run_threads(kRanks, [&, &make = make, &before = before](int rank) {
    traces.at(static_cast<std::size_t>(rank)) =
        train(rank, fastamp::agree_over(thread_group(meeting, rank)), make, before);
  });
  CHECK(meeting.rounds() == kGradients.size());
  double scale = 16.0;
  int clean = 0;
  for (std::size_t i = 0; i < kGradients.size(); ++i) {
    CAPTURE(i);
    clean = kSkipped[i] ? 0 : clean + 1;
    scale = kSkipped[i] ? scale / 2 : scale;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      CAPTURE(rank);
      const auto& now = traces.at(rank).at(i);
      CHECK(now.skipped == kSkipped[i]);
      CHECK(now.scale == scale);
      const float before_it = i == 0 ? 1.0F : traces.at(rank)[i - 1].weight;
      const bool moved = !kSkipped[i] && kGradients[i].at(rank).has_value();
      CHECK((now.weight != before_it) == moved);
    }
  }
}

TEST_CASE("agreement: without one nothing is exchanged", "[scaler]") {
  RankMeeting meeting;
  std::array<bool, kRanks> skipped{};
  run_threads(kRanks, [&](int rank) {
    const auto group = thread_group(meeting, rank);
    auto scaler = started(cpu_options());
    auto optimizer = sgd({parameter_with(rank == 0 ? kInfinity : 1.0F)});
    scaler.step(optimizer);
    scaler.update();
    skipped.at(static_cast<std::size_t>(rank)) = scaler.step_was_skipped();
  });
  CHECK(meeting.rounds() == 0);
  CHECK(skipped == std::array{true, false});
}

TEST_CASE("agreement: one for each optimizer of an iteration", "[scaler]") {
  RankMeeting meeting;
  std::array<std::array<bool, 2>, kRanks> skipped{};
  run_threads(kRanks, [&](int rank) {
    auto scaler =
        started(cpu_options().agreement(fastamp::agree_over(thread_group(meeting, rank))));
    auto first = sgd({parameter_with(rank == 0 ? kInfinity : 1.0F)});
    auto second = sgd({parameter_with(1.0F)});
    scaler.unscale_(first);
    scaler.step(first);
    scaler.step(second);
    scaler.update();
    skipped.at(static_cast<std::size_t>(rank)) = {scaler.step_was_skipped_for(first),
                                                  scaler.step_was_skipped_for(second)};
  });
  CHECK(meeting.rounds() == 2);
  CHECK(skipped == std::array{std::array{true, false}, std::array{true, false}});
}

TEST_CASE("agreement: error_if_nonfinite refuses on all ranks if one has inf", "[scaler]") {
  const auto [name, make] =
      GENERATE(table<const char*, Make>({{"torch's", of_torch}, {"fastamp's", own}}));
  CAPTURE(name);
  RankMeeting meeting;
  std::array<std::string, kRanks> texts;
  std::array<bool, kRanks> skipped{};
  run_threads(kRanks, [&, &make = make](int rank) {
    auto scaler =
        started(cpu_options().agreement(fastamp::agree_over(thread_group(meeting, rank))));
    const auto optimizer = make({parameter_with(rank == 0 ? kInfinity : 1.0F)});
    try {
      scaler.clip_grad_norm_(*optimizer, 1.0, 2.0, /*error_if_nonfinite=*/true);
    } catch (const c10::Error& error) {
      texts.at(static_cast<std::size_t>(rank)) = error.what_without_backtrace();
    }
    scaler.step(*optimizer);
    scaler.update();
    skipped.at(static_cast<std::size_t>(rank)) = scaler.step_was_skipped();
  });
  CHECK(meeting.rounds() == 2);  // Of the flag, and of whether all norms are finite.
  CHECK(texts[0].find("expected finite gradients, got a norm of inf") != std::string::npos);
  CHECK(texts[1].find("expected finite gradients on all ranks") != std::string::npos);
  CHECK(skipped == std::array{true, true});
}

TEST_CASE("agreement: error_if_nonfinite asks a rank without gradients, too", "[scaler]") {
  const auto [name, make] =
      GENERATE(table<const char*, Make>({{"torch's", of_torch}, {"fastamp's", own}}));
  const float other = GENERATE(1.0F, kInfinity);
  CAPTURE(name, other);
  RankMeeting meeting;
  std::array<float, kRanks> norms{-1.0F, -1.0F};
  run_threads(kRanks, [&, &make = make](int rank) {
    auto scaler =
        started(cpu_options().agreement(fastamp::agree_over(thread_group(meeting, rank))));
    auto parameter = parameter_with(other, 1);
    if (rank == 0) {
      parameter.mutable_grad() = at::Tensor();
    }
    const auto optimizer = make({parameter});
    scaler.unscale_(*optimizer);
    try {
      const auto norm = scaler.clip_grad_norm_(*optimizer, 1.0, 2.0, /*error_if_nonfinite=*/true);
      norms.at(static_cast<std::size_t>(rank)) = norm.item<float>();
    } catch (const c10::Error& error) {
      CHECK(std::string(error.what()).find("expected finite gradients") != std::string::npos);
    }
  });
  const bool is_finite = other == 1.0F;
  CHECK(norms == (is_finite ? std::array{0.0F, 1.0F / 65536.0F} : std::array{-1.0F, -1.0F}));
}

TEST_CASE("agreement: it is reported where it overflowed, skipped everywhere", "[scaler]") {
  RankMeeting meeting;
  std::array<std::size_t, kRanks> reported{};
  std::array<std::int64_t, kRanks> steps{};
  run_threads(kRanks, [&](int rank) {
    auto scaler =
        started(cpu_options().agreement(fastamp::agree_over(thread_group(meeting, rank))));
    auto optimizer = sgd({parameter_with(1.0F), parameter_with(rank == 1 ? kNaN : 1.0F)});
    scaler.step(optimizer);
    scaler.update();
    const auto report = scaler.overflow_report();
    reported.at(static_cast<std::size_t>(rank)) = report.gradients.size();
    steps.at(static_cast<std::size_t>(rank)) = report.step;
  });
  CHECK(reported == std::array<std::size_t, kRanks>{0, 1});
  CHECK(steps == std::array<std::int64_t, kRanks>{0, 0});
}

TEST_CASE("agreement: a lambda over a store needs no backend of process groups", "[scaler]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();  // A TCPStore between processes.
  std::array<std::vector<Iteration>, kRanks> traces;
  run_threads(kRanks, [&](int rank) {
    const auto agreement = [store, round = 0](const at::Tensor& found_inf) mutable {
      const auto key = "overflow/" + std::to_string(round++);
      const bool overflow = found_inf.item<float>() != 0.0F;
      store->add(key + "/seen", overflow ? 1 : 0);
      if (store->add(key + "/ranks", 1) == static_cast<int64_t>(kRanks)) {
        store->set(key + "/done", std::vector<uint8_t>{1});
      }
      store->wait({key + "/done"});
      found_inf.fill_(store->add(key + "/seen", 0) > 0 ? 1.0 : 0.0);
    };
    traces.at(static_cast<std::size_t>(rank)) = train(rank, agreement, own, nothing);
  });
  for (std::size_t i = 0; i < kSkipped.size(); ++i) {
    CHECK(traces[0][i].skipped == kSkipped[i]);
    CHECK(traces[1][i].skipped == kSkipped[i]);
    CHECK(traces[0][i].scale == traces[1][i].scale);
  }
}

TEST_CASE("agreement: what it throws reaches the caller, and nothing is stepped", "[scaler]") {
  auto scaler = started(cpu_options().agreement(
      [](const at::Tensor&) { throw std::runtime_error("connection lost"); }));
  const auto parameter = parameter_with(1.0F);
  auto optimizer = sgd({parameter});
  CHECK_THROWS_WITH(scaler.step(optimizer), "connection lost");
  CHECK(parameter[0].item<float>() == 1.0F);
}

TEST_CASE("agreement: a disabled scaler does not communicate", "[scaler]") {
  int calls = 0;
  GradScaler scaler(cpu_options().enabled(false).agreement([&](const at::Tensor&) { ++calls; }));
  auto optimizer = sgd({parameter_with(1.0F)});
  scaler.scale(at::ones({}));
  scaler.unscale_(optimizer);
  scaler.step(optimizer);
  scaler.update();
  CHECK(calls == 0);
}

TEST_CASE("agreement: no group is refused", "[scaler]") {
  CHECK(error_text<c10::ValueError>([] { fastamp::agree_over({}); }).find("agree_over: expected") !=
        std::string::npos);
}
