// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <vector>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

constexpr int kSteps = 60;
constexpr double kLearningRate = 0.1;

/// An MLP 64-256-10 with random data, the same for every run.
struct Training {
  Training() {
    at::manual_seed(42);
    parameters = {at::randn({256, 64}).div_(8), at::zeros({256}), at::randn({10, 256}).div_(16),
                  at::zeros({10})};
    for (auto& parameter : parameters) {
      parameter.requires_grad_();
    }
    inputs = at::randn({128, 64});
    labels = at::randint(10, {128}, at::kLong);
  }

  /// Forward in a region, backward outside, as programs do. Returns the loss.
  template <class MakeRegion>
  float step(MakeRegion&& make_region) {
    at::Tensor loss;
    {
      [[maybe_unused]] const auto region = make_region();
      const auto hidden = at::relu(at::linear(inputs, parameters[0], parameters[1]));
      const auto logits = at::linear(hidden, parameters[2], parameters[3]);
      CHECK(logits.scalar_type() == c10::kBFloat16);
      loss = at::cross_entropy_loss(logits, labels);
    }
    loss.backward();
    gradients.clear();
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters) {
      gradients.push_back(parameter.grad());
      parameter.sub_(parameter.grad(), kLearningRate);
      parameter.mutable_grad() = at::Tensor();
    }
    return loss.item<float>();
  }

  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  at::Tensor inputs;
  at::Tensor labels;
};

struct History {
  std::vector<float> losses;
  std::vector<at::Tensor> first_gradients;
  std::vector<at::Tensor> parameters;
};

template <class MakeRegion>
History train(MakeRegion&& make_region) {
  Training training;
  History history;
  for (int i = 0; i < kSteps; ++i) {
    history.losses.push_back(training.step(make_region));
    if (i == 0) {
      history.first_gradients = training.gradients;
    }
  }
  history.parameters = training.parameters;
  return history;
}

History train_by_torch() {
  const TorchKernels kernels;
  return train([] { return std::optional<HandRegion>(std::in_place, c10::kCPU, c10::kBFloat16); });
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace,
                 "training: every loss, gradient and parameter is what torch's kernels give",
                 "[autocast][training]") {
  const auto by_torch = train_by_torch();
  const auto by_fastamp =
      train([] { return std::optional<AutocastGuard>(std::in_place, c10::kCPU, c10::kBFloat16); });
  CHECK(by_fastamp.losses == by_torch.losses);
  REQUIRE(by_fastamp.first_gradients.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    CHECK(by_fastamp.first_gradients[i].scalar_type() == c10::kFloat);
    CHECK(bit_equal(by_fastamp.first_gradients[i], by_torch.first_gradients[i]));
    CHECK(bit_equal(by_fastamp.parameters[i], by_torch.parameters[i]));
  }
  CHECK(by_fastamp.losses.back() < 0.6F * by_fastamp.losses.front());
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "training: one region around all steps trains as one region per forward does",
                 "[autocast][training]") {
  // Backward and optimizer inside: each step edits the weights whose casts are kept.
  const auto per_step =
      train([] { return std::optional<AutocastGuard>(std::in_place, c10::kCPU, c10::kBFloat16); });
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto around = train([] { return 0; });
  CHECK(around.losses == per_step.losses);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(bit_equal(around.parameters[i], per_step.parameters[i]));
  }
}
