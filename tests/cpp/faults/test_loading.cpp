// SPDX-License-Identifier: Apache-2.0
// Loading without memory: an error, and everything is as it was.

#include "faults/every_allocation.h"
#include "faults/training.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/step_guard.h>

#include <torch/serialize.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <string>

using fastamp::GradScaler;
using fastamp::GradScalerOptions;
using fastamp::GradScalerState;
using fastamp::StepGuard;
using fastamp::StepGuardOptions;
using fastamp::test::fail_every_allocation;
using fastamp::test::MakeOptimizer;
using fastamp::test::mixed_shapes;
using fastamp::test::Seen;
using fastamp::test::Subject;
using fastamp::test::Training;
using fastamp::test::with;
using torch::serialize::InputArchive;

namespace optim = fastamp::optim;

namespace {

constexpr auto kInArchives = fastamp::test::TorchEnds::kInArchives;

template <typename Saved>
std::shared_ptr<InputArchive> archive_of(Saved& saved) {
  std::stringstream stream;
  torch::serialize::OutputArchive archive;
  archive << saved;
  archive.save_to(stream);
  auto read = std::make_shared<InputArchive>();
  read->load_from(stream);
  return read;
}

/// A scaler's subject and the state that it loads, of one that has gone on and has skipped a step.
struct Loading {
  explicit Loading(const MakeOptimizer& make, const GradScalerOptions& options = {})
      : source(mixed_shapes(), make, options), target(mixed_shapes(), make, options) {
    for (const double factor : {1.0, HUGE_VAL, 1.0}) {
      source.fill();
      source.parameters[0].mutable_grad().mul_(factor);
      source.scaler.step(*source.optimizer);
      source.scaler.update();
    }
  }

  Training source;
  Training target;
};

const auto kSgd = with<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9));

GradScalerOptions wide_options() {
  return GradScalerOptions().history_size(3).hysteresis(2).fast_growth_interval(4);
}

}  // namespace

TEST_CASE("memory that fails where a scaler is loaded leaves its state", "[faults]") {
  SECTION("from an archive") {
    fail_every_allocation(
        []() -> Subject {
          auto subject = std::make_shared<Loading>(kSgd, wide_options());
          auto archive = archive_of(subject->source.scaler);
          return {[=] { subject->target.scaler.load(*archive); },
                  [=] { return subject->target.look(); }, subject};
        },
        {}, kInArchives);
  }
  SECTION("of one that has fewer rules") {
    fail_every_allocation([]() -> Subject {
      auto subject = std::make_shared<Loading>(kSgd, wide_options());
      auto plain = std::make_shared<Training>(mixed_shapes(), kSgd, GradScalerOptions());
      const auto state = subject->source.scaler.state();
      return {[=] { plain->scaler.load_state(state); }, [=] { return plain->look(); }, plain};
    });
  }
  SECTION("from a dict of Python's") {
    fail_every_allocation([]() -> Subject {
      auto subject = std::make_shared<Loading>(kSgd, wide_options());
      const auto dict = subject->source.scaler.state()->to_python();
      return {[=] { subject->target.scaler.load_state(GradScalerState::from_python(dict)); },
              [=] { return subject->target.look(); }, subject};
    });
  }
}

TEST_CASE("memory that fails where an optimizer is loaded leaves its state", "[faults]") {
  const auto load = [](const MakeOptimizer& make) {
    fail_every_allocation(
        [&]() -> Subject {
          auto subject = std::make_shared<Loading>(make);
          auto archive = archive_of(*subject->source.optimizer);
          return {[=] { subject->target.optimizer->load(*archive); },
                  [=] { return subject->target.look(); }, subject};
        },
        {}, kInArchives);
  };
  SECTION("SGD") { load(kSgd); }
  SECTION("AdamW with remainders") {
    load(with<optim::AdamW>(
        optim::AdamWOptions(0.1).master(optim::MasterStorage::kRemainder).amsgrad(true)));
  }
  SECTION("AdamW in 16 bits") {
    load(with<optim::AdamW>(optim::AdamWOptions(0.1).state_dtype(at::kBFloat16)));
  }
}

TEST_CASE("memory that fails where a guard is loaded leaves its state", "[faults]") {
  struct Guards {
    Guards() : source(mixed_shapes(), kSgd, {}), target(mixed_shapes(), kSgd, {}) {
      for (const double factor : {1.0, HUGE_VAL, 1.0}) {
        source.fill();
        source.parameters[0].mutable_grad().mul_(factor);
        guard.step();
      }
    }
    static StepGuardOptions options() {
      return StepGuardOptions().history_size(3).spike(
          fastamp::SpikeOptions{.factor = 4.0, .window = 4});
    }
    Training source;
    Training target;
    StepGuard guard{*source.optimizer, options()};
    StepGuard loaded{*target.optimizer, options()};
  };
  fail_every_allocation(
      []() -> Subject {
        auto subject = std::make_shared<Guards>();
        auto archive = archive_of(subject->guard);
        const auto look = [=] {
          const auto state = subject->loaded.state();
          std::ostringstream text;
          text << state.skipped_in_a_row << " " << state.overflow_report.str() << " "
               << state.spike->count;
          for (const auto& row : state.history) {
            text << "\n" << row.step << " " << row.norm;
          }
          Seen seen;
          return seen.add(text.str());
        };
        return {[=] { *archive >> subject->loaded; }, look, subject};
      },
      {}, kInArchives);
}
