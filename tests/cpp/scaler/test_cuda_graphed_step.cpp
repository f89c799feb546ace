// SPDX-License-Identifier: Apache-2.0
// Replays of a captured step beside the same step run eagerly.

#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/ops/mse_loss.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cstdint>
#include <limits>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::GradScaler;
using fastamp::GradScalerOptions;
using fastamp::GraphedStep;
using fastamp::GraphedStepOptions;
using fastamp::optim::AdamW;

namespace {

const auto kOptions = at::TensorOptions(at::kFloat).device(at::kCUDA);

std::vector<at::Tensor> batch() {
  return {at::randn({8, 4}, kOptions), at::randn({8, 3}, kOptions)};
}

/// The stream whose memory an address is; null if it is no memory of the caching allocator.
cudaStream_t stream_of(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot().segments) {
    const auto begin = static_cast<std::uintptr_t>(segment.address);
    if (at >= begin && at < begin + segment.total_size) {
      return static_cast<cudaStream_t>(segment.stream);
    }
  }
  return nullptr;
}

}  // namespace

TEST_CASE("GraphedStep: replays move parameters, scale and history as eager steps do",
          "[cuda][graph]") {
  Params params{at::randn({4, 3}, kOptions).requires_grad_(true)};
  auto reference = copy_of(params);
  const auto before = copy_of(params);
  AdamW optimizer(params, {1e-2});
  AdamW eager(reference, {1e-2});
  torch::optim::StepLR schedule(optimizer, 3, 0.5);
  torch::optim::StepLR eager_schedule(eager, 3, 0.5);
  GradScaler scaler(GradScalerOptions().init_scale(256.0).growth_interval(4));
  GradScaler eager_scaler(GradScalerOptions().init_scale(256.0).growth_interval(4));
  const auto loss_of = [](const Params& weights, const std::vector<at::Tensor>& inputs) {
    return at::mse_loss(inputs[0].mm(weights[0]), inputs[1]);
  };
  int calls = 0;
  const auto loss = [&](const auto& inputs) {
    ++calls;
    return loss_of(params, inputs);
  };
  GraphedStep step(loss, optimizer, scaler, batch(),
                   GraphedStepOptions().autocast(false).max_norm(0.5));
  REQUIRE(step.is_graphed());
  const int calls_of_capture = calls;
  REQUIRE(equal(params, before));
  for (int i = 0; i < 20; ++i) {
    auto inputs = batch();
    const bool overflow = i % 7 == 5;
    if (overflow) {
      inputs[0][0][0] = std::numeric_limits<float>::infinity();
    }
    const auto version = params[0]._version();
    step(inputs);
    REQUIRE(params[0]._version() > version);  // Caches of its casts ask for that.
    schedule.step();
    eager.zero_grad();
    eager_scaler.scale(loss_of(reference, inputs)).backward();
    eager_scaler.clip_grad_norm_(eager, 0.5);
    eager_scaler.step(eager);
    eager_scaler.update();
    eager_schedule.step();
    REQUIRE(difference(params, reference) <= 8.0);
    REQUIRE(scaler.get_scale() == eager_scaler.get_scale());
    REQUIRE(scaler.step_was_skipped() == overflow);
  }
  CHECK(calls == calls_of_capture);
  CHECK(scaler.history().size() == 20);
  CHECK(scaler.overflow_report().gradients.size() == 1);
}

TEST_CASE("GraphedStep: optimizer states are memory of the stream that the step is made on",
          "[cuda][graph]") {
  const c10::cuda::CUDAStreamGuard own(c10::cuda::getStreamFromPool());
  Params params{at::randn({4, 3}, kOptions).requires_grad_(true)};
  AdamW optimizer(params, {1e-2});
  GradScaler scaler(GradScalerOptions().init_scale(256.0));
  const GraphedStep step(
      [&](const auto& inputs) { return at::mse_loss(inputs[0].mm(params[0]), inputs[1]); },
      optimizer, scaler, batch());
  const auto& state = static_cast<const fastamp::optim::AdamWParamState&>(
      *optimizer.state().at(params[0].unsafeGetTensorImpl()));
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  CHECK(stream_of(state.exp_avg().const_data_ptr()) == stream);
  CHECK(stream_of(state.exp_avg_sq().const_data_ptr()) == stream);
}
