// SPDX-License-Identifier: Apache-2.0
// Steps without memory: an error and no parameter, gradient or state moved.

#include "faults/every_allocation.h"
#include "faults/training.h"
#include "optim/starting_masters.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/low_precision_weights.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/optim/stored_state.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

using fastamp::GradScalerOptions;
using fastamp::test::fail_every_allocation;
using fastamp::test::MakeOptimizer;
using fastamp::test::mixed_shapes;
using fastamp::test::Parameters;
using fastamp::test::rounds;
using fastamp::test::Seen;
using fastamp::test::Subject;
using fastamp::test::Training;
using fastamp::test::training;
using fastamp::test::with;

namespace optim = fastamp::optim;

namespace {

void step(Training& subject) { subject.scaler.step(*subject.optimizer); }

void step_once(Training& subject) {
  step(subject);
  subject.scaler.update();
  subject.fill();
}

void clip_norm(Training& subject) { subject.scaler.clip_grad_norm_(*subject.optimizer, 0.1); }

/// The first step, which makes the states, and a later one.
void fail_steps(const Parameters& shapes, const MakeOptimizer& optimizer,
                const GradScalerOptions& options = {}) {
  fail_every_allocation(training(shapes, optimizer, step, options));
  fail_every_allocation(training(shapes, optimizer, step, options, step_once));
}

/// Shapes that a seed draws: matrices of both kinds, one of them with codes where there are such.
Parameters drawn_shapes(int seed) {
  std::mt19937 draw(static_cast<unsigned>(seed));
  const auto below = [&](int64_t end) { return 1 + static_cast<int64_t>(draw()) % end; };
  Parameters shapes{at::empty({64, 64})};
  for (int64_t i = below(4); i >= 0; --i) {
    shapes.push_back(at::empty({below(6), below(6)}, draw() % 2 == 0 ? at::kFloat : at::kBFloat16));
  }
  return shapes;
}

Parameters float_shapes() { return {at::empty({4, 3}), at::empty({5}), at::empty({8, 2})}; }

}  // namespace

TEST_CASE("memory that fails in a step of fastamp's optimizers", "[faults]") {
  const auto seed = GENERATE(range(0, rounds()));
  CAPTURE(seed);
  const auto shapes = seed == 0 ? mixed_shapes() : drawn_shapes(seed);
  SECTION("SGD") {
    fail_steps(shapes, with<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9).nesterov(true)));
  }
  SECTION("Adam with remainders and the greatest moments") {
    fail_steps(shapes, with<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true).master(
                           optim::MasterStorage::kRemainder)));
  }
  SECTION("AdamW with moments in 16 bits") {
    fail_steps(shapes, with<optim::AdamW>(optim::AdamWOptions(0.1).state_dtype(at::kBFloat16)));
  }
}

TEST_CASE("memory that fails in a step of moments in 8 bits", "[faults]") {
  const auto seed = GENERATE(range(0, rounds()));
  CAPTURE(seed);
  const auto shapes = drawn_shapes(seed);
  fail_steps(shapes, with<optim::AdamW>(optim::AdamWOptions(0.1).state_dtype(at::kByte)));
}

TEST_CASE("memory that fails in Muon's step, but for torch's products", "[faults]") {
  // Its momentum is written before them. Without a gradient's products there are none to fail.
  fail_every_allocation(training({at::empty({4, 3}), at::empty({8, 2})},
                                 with<optim::Muon>(optim::MuonOptions(0.1)), step, {},
                                 [](Training& subject) {
                                   step_once(subject);
                                   subject.parameters[0].mutable_grad()[0][1] = INFINITY;
                                 }));
}

TEST_CASE("memory that fails in a step of LibTorch's optimizers that are fused", "[faults]") {
  const auto options = GradScalerOptions().fuse(true);
  SECTION("SGD") {
    fail_steps(float_shapes(), with<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)),
               options);
  }
  SECTION("Adam") {
    fail_steps(float_shapes(), with<torch::optim::Adam>(torch::optim::AdamOptions(0.1)), options);
  }
  SECTION("AdamW") {
    fail_steps(float_shapes(),
               with<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1).amsgrad(true)), options);
  }
}

TEST_CASE("memory that fails in a step that clips, or is skipped", "[faults]") {
  const auto optimizer = with<optim::AdamW>(optim::AdamWOptions(0.1));
  const auto options = GradScalerOptions().keep_scaled_grads(GENERATE(false, true));
  fail_every_allocation(training(mixed_shapes(), optimizer, step, options, clip_norm));
  fail_every_allocation(training(mixed_shapes(), optimizer, step, options, [](Training& subject) {
    subject.parameters[0].mutable_grad()[0][1] = INFINITY;
  }));
}

TEST_CASE("memory that fails in a step without a scaler", "[faults]") {
  const auto plain = [](Training& subject) { subject.optimizer->step(); };
  fail_every_allocation(
      training(mixed_shapes(), with<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)), plain));
}

TEST_CASE("memory that fails where moments change their layout keeps them", "[faults]") {
  // The options are edited between two steps: moments become codes, or codes moments.
  const auto from = GENERATE(at::kFloat, at::kByte);
  const auto optimizer = with<optim::AdamW>(optim::AdamWOptions(0.1).state_dtype(from));
  const auto first = [from](Training& subject) {
    step_once(subject);
    for (auto& group : subject.optimizer->param_groups()) {
      static_cast<optim::AdamWOptions&>(group.options())
          .state_dtype(from == at::kFloat ? at::kByte : at::kBFloat16);
    }
  };
  const auto makes_no_step = [](Training& subject) { step(subject); };
  // A layout that has changed says the same, or nearly so: only what comes after it is compared.
  fail_every_allocation([=]() -> Subject {
    auto subject =
        training({at::empty({64, 64}), at::empty({3})}, optimizer, makes_no_step, {}, first)();
    const auto owner = std::static_pointer_cast<Training>(subject.owner);
    subject.look = [owner] {
      Seen seen;
      for (const auto& parameter : owner->parameters) {
        seen.add(parameter).add(parameter.grad());
      }
      return seen;
    };
    return subject;
  });
}

TEST_CASE("memory that fails in a step that writes casts of weights", "[faults]") {
  const auto optimizer = with<optim::AdamW>(optim::AdamWOptions(0.1).autocast_dtype(at::kBFloat16));
  const auto product = [](Training& subject) {
    const fastamp::AutocastGuard region(c10::kCPU, c10::kBFloat16);
    return at::mm(subject.parameters[0].detach(), subject.parameters[0]);
  };
  const Parameters shapes{at::empty({4, 4}), at::empty({4, 4})};
  const auto first = [=](Training& subject) {
    product(subject);
    step_once(subject);
    product(subject);
  };
  fail_every_allocation([=]() -> Subject {
    auto subject = training(shapes, optimizer, step, {}, first)();
    const auto owner = std::static_pointer_cast<Training>(subject.owner);
    const auto look = subject.look;
    subject.look = [=] { return look().add(product(*owner)); };
    return subject;
  });
}

namespace {

/// A weight in 16 bits rounded from float32 values, and an optimizer that starts from those.
struct LowPrecision {
  explicit LowPrecision(optim::MasterStorage master) {
    const at::NoGradGuard no_grad;
    layer->weight.copy_(fastamp::test::numbers({3, 4}));
    optimizer = std::make_unique<optim::AdamW>(layer->parameters(),
                                               optim::AdamWOptions(0.1).master(master));
  }

  void lower() {
    optim::low_precision_weights_(*layer);
    layer->weight.mutable_grad() = fastamp::test::numbers({3, 4});
  }

  Seen look() const {
    const at::Tensor& weight = layer->weight;
    Seen seen;
    seen.add(weight).add(optim::starting_master_of(weight));
    const auto state = optimizer->state().find(weight.unsafeGetTensorImpl());
    if (state != optimizer->state().end()) {
      const auto& held = static_cast<const optim::AdamWParamState&>(*state->second);
      const bool starts = held.steps().item<float>() == 0.0F;
      if (starts && (held.master().defined() || held.remainder().defined())) {
        seen.tensors.back() = held.master().defined()
                                  ? held.master().clone()
                                  : optim::master_from_remainder(weight, held.remainder());
      } else if (!starts) {
        seen.add(held.master()).add(held.remainder()).add(held.exp_avg());
      }
    }
    return seen;
  }

  torch::nn::Linear layer{torch::nn::LinearOptions(4, 3).bias(false)};
  std::unique_ptr<optim::AdamW> optimizer;
};

}  // namespace

TEST_CASE("memory that fails where weights go into 16 bits leaves them in 32", "[faults]") {
  fail_every_allocation([]() -> Subject {
    auto subject = std::make_shared<LowPrecision>(optim::MasterStorage::kFloat);
    return {[=] { optim::low_precision_weights_(*subject->layer); },
            [=] { return subject->look(); }, subject};
  });
}

TEST_CASE("memory that fails in the first step of a weight in 16 bits keeps its master",
          "[faults]") {
  const auto master = GENERATE(optim::MasterStorage::kFloat, optim::MasterStorage::kRemainder);
  fail_every_allocation([=]() -> Subject {
    auto subject = std::make_shared<LowPrecision>(master);
    subject->lower();
    return {[=] { subject->optimizer->step(); }, [=] { return subject->look(); }, subject};
  });
}
