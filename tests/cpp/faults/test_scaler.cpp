// SPDX-License-Identifier: Apache-2.0
// Calls on scalers and guards without memory: an error, and gradients and scaler as they were.

#include "faults/every_allocation.h"
#include "faults/training.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/scaler/step_guard.h>

#include <ATen/ops/full.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

using fastamp::GradScalerOptions;
using fastamp::StepGuard;
using fastamp::StepGuardOptions;
using fastamp::test::Call;
using fastamp::test::fail_every_allocation;
using fastamp::test::MakeOptimizer;
using fastamp::test::mixed_shapes;
using fastamp::test::Seen;
using fastamp::test::Subject;
using fastamp::test::Training;
using fastamp::test::training;
using fastamp::test::with;

namespace {

const auto kTorchs = with<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
const auto kFastamps = with<fastamp::optim::AdamW>(fastamp::optim::AdamWOptions(0.1));

void unscale(Training& subject) { subject.scaler.unscale_(*subject.optimizer); }
void step(Training& subject) { subject.scaler.step(*subject.optimizer); }
void clip_norm(Training& subject) { subject.scaler.clip_grad_norm_(*subject.optimizer, 0.1); }
void clip_value(Training& subject) { subject.scaler.clip_grad_value_(*subject.optimizer, 0.1); }

void overflow(Training& subject) { subject.parameters[0].mutable_grad()[0][1] = INFINITY; }

}  // namespace

TEST_CASE("memory that fails in unscale_ leaves gradients scaled", "[faults]") {
  SECTION("finite") { fail_every_allocation(training(mixed_shapes(), kTorchs, unscale)); }
  SECTION("an overflow") {
    fail_every_allocation(training(mixed_shapes(), kTorchs, unscale, {}, overflow));
  }
  SECTION("clips that were put off") {
    fail_every_allocation(training(mixed_shapes(), kFastamps, unscale, {}, clip_norm),
                          {training(mixed_shapes(), kFastamps, unscale)});
  }
}

TEST_CASE("memory that fails in a clip leaves gradients as they were or unscaled", "[faults]") {
  const auto& optimizer = GENERATE_REF(kTorchs, kFastamps);
  const auto whole = training(mixed_shapes(), optimizer, unscale);
  SECTION("by norm") {
    const double order = GENERATE(2.0, 1.0);
    const auto clip = [order](Training& subject) {
      subject.scaler.clip_grad_norm_(*subject.optimizer, 0.1, order);
    };
    fail_every_allocation(training(mixed_shapes(), optimizer, clip), {whole});
    fail_every_allocation(training(mixed_shapes(), optimizer, clip, {}, unscale));
  }
}

TEST_CASE("memory that fails in a clip by value leaves some clipped at most", "[faults]") {
  SECTION("at once") {
    // torch's operators take one gradient after the other; clipped again, it stays as it is.
    std::vector<fastamp::test::MakeSubject> halfway;
    for (std::size_t clipped = 0; clipped < 2 * mixed_shapes().size(); ++clipped) {
      const auto part = [clipped](Training& subject) {
        unscale(subject);
        for (std::size_t i = 0; i < clipped; ++i) {
          const auto gradient = subject.parameters[i % subject.parameters.size()].grad();
          i < subject.parameters.size() ? gradient.clamp_min_(-0.1) : gradient.clamp_max_(0.1);
        }
      };
      halfway.push_back(training(mixed_shapes(), kTorchs, part));
    }
    fail_every_allocation(training(mixed_shapes(), kTorchs, clip_value), halfway);
  }
  SECTION("at the step") {
    fail_every_allocation(training(mixed_shapes(), kFastamps, clip_value));
    fail_every_allocation(training(mixed_shapes(), kFastamps, step, {}, clip_value));
  }
}

TEST_CASE("memory that fails in update leaves the iteration open or ends it", "[faults]") {
  const auto options = GradScalerOptions().history_size(4).hysteresis(2).fast_growth_interval(2);
  const auto update = [](Training& subject) { subject.scaler.update(); };
  SECTION("after a step") {
    const auto& optimizer = GENERATE_REF(kTorchs, kFastamps);
    fail_every_allocation(training(mixed_shapes(), optimizer, update, options, step));
  }
  SECTION("after an overflow, with hooks") {
    const auto first = [](Training& subject) {
      subject.scaler.register_on_skip([](const fastamp::SkippedStep& /*skip*/) {});
      overflow(subject);
      step(subject);
    };
    fail_every_allocation(training(mixed_shapes(), kFastamps, update, options, first));
  }
  SECTION("with a scale of the caller's") {
    fail_every_allocation(training(
        mixed_shapes(), kTorchs, [](Training& subject) { subject.scaler.update(3.0); }, options,
        step));
  }
}

TEST_CASE("memory that fails in scale leaves nothing behind", "[faults]") {
  const auto scale = [](Training& subject) {
    subject.kept = subject.scaler.scale(subject.parameters[0]);
  };
  fail_every_allocation(training(mixed_shapes(), kTorchs, scale), {},
                        fastamp::test::TorchEnds::kWithGraphs);
}

namespace {

/// A guard beside an optimizer, whose scaler is not used.
struct Guarded {
  Guarded(const MakeOptimizer& make, const StepGuardOptions& options)
      : training(mixed_shapes(), make, {}), guard(*training.optimizer, options) {}

  Seen look() {
    auto seen = training.look();
    std::ostringstream text;
    const auto state = guard.state();
    for (const auto& row : state.history) {
      text << row.step << " " << row.skipped << " " << row.norm << "\n";
    }
    if (state.spike) {
      text << state.spike->count;
      for (const double norm : state.spike->norms) {
        text << " " << norm;
      }
    }
    return seen.add(text.str());
  }

  Training training;
  StepGuard guard;
};

fastamp::test::MakeSubject guarded(const MakeOptimizer& make, const StepGuardOptions& options,
                                   const std::function<void(Guarded&)>& call,
                                   const std::function<void(Guarded&)>& first = {}) {
  return [=]() -> Subject {
    auto subject = std::make_shared<Guarded>(make, options);
    if (first) {
      first(*subject);
    }
    return {[=] { call(*subject); }, [=] { return subject->look(); }, subject};
  };
}

}  // namespace

TEST_CASE("memory that fails in a guarded step leaves it to be made", "[faults]") {
  const auto options =
      StepGuardOptions().history_size(3).spike(fastamp::SpikeOptions{.factor = 4.0, .window = 4});
  const auto guarded_step = [](Guarded& subject) { subject.guard.step(); };
  SECTION("the first") { fail_every_allocation(guarded(kFastamps, options, guarded_step)); }
  SECTION("of a loss that is NaN") {
    fail_every_allocation(guarded(kFastamps, options, guarded_step, [](Guarded& subject) {
      subject.guard.check_loss(at::full({}, std::nan("")));
    }));
  }
  SECTION("that clips") {
    fail_every_allocation(guarded(kFastamps, options, guarded_step,
                                  [](Guarded& subject) { subject.guard.clip_grad_norm_(0.1); }));
  }
  SECTION("a clip") {
    const auto& optimizer = GENERATE_REF(kTorchs, kFastamps);
    fail_every_allocation(
        guarded(optimizer, options, [](Guarded& subject) { subject.guard.clip_grad_norm_(0.1); }));
  }
}
