// SPDX-License-Identifier: Apache-2.0
// Training on several CUDA devices, and on one that is not current, beside one device.

#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/scaler/graphed_step.h>

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/mse_loss.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::AutocastGuard;
using fastamp::GradScaler;
using fastamp::GradScalerOptions;
using fastamp::GraphedStep;
using fastamp::GraphedStepOptions;
using fastamp::optim::AdamW;

namespace {

const c10::Device kHere(c10::kCUDA, 0);
const c10::Device kThere(c10::kCUDA, 1);

bool has_two_devices() {
  if (c10::cuda::device_count() < 2) {
    WARN("left out: needs two CUDA devices");
    return false;
  }
  return true;
}

at::Tensor drawn(at::IntArrayRef sizes, std::int64_t seed, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn(sizes, generator, at::kFloat).to(device);
}

struct Result {
  Params params;
  std::vector<double> scales;
};

/// Steps of two layers, each on its device; the gradients of `bad` overflow in the third.
Result train(c10::Device first, c10::Device second, std::size_t bad) {
  Params params{drawn({8, 16}, 1, first).requires_grad_(),
                drawn({16, 4}, 2, second).requires_grad_()};
  AdamW optimizer(params, {1e-2});
  GradScaler scaler(GradScalerOptions().init_scale(64.0));
  Result result;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const AutocastGuard region(c10::kCUDA, at::kHalf);
      const auto hidden = drawn({5, 8}, 10 + step, first).mm(params[0]).relu();
      loss = hidden.to(second).mm(params[1]).to(at::kFloat).square().mean();
    }
    scaler.scale(loss).backward();
    if (step == 2) {
      params[bad].mutable_grad()[0][0] = std::numeric_limits<float>::infinity();
    }
    scaler.step(optimizer);
    scaler.update();
    result.scales.push_back(scaler.get_scale());
  }
  for (const auto& param : params) {
    result.params.push_back(param.detach().cpu());
  }
  return result;
}

}  // namespace

TEST_CASE("GradScaler: layers on two devices step as on one, whichever overflows",
          "[cuda][devices]") {
  if (!has_two_devices()) {
    return;
  }
  for (const std::size_t bad : {std::size_t{0}, std::size_t{1}}) {
    const auto on_one = train(kHere, kHere, bad);
    REQUIRE(on_one.scales == std::vector<double>{64.0, 64.0, 32.0, 32.0, 32.0});
    const auto current = static_cast<c10::DeviceIndex>(bad);
    const c10::cuda::CUDAGuard guard(current);
    const auto on_two = train(kHere, kThere, bad);
    CHECK(on_two.scales == on_one.scales);
    CHECK(equal(on_two.params, on_one.params));
    const auto on_other = train(kThere, kThere, bad);
    CHECK(on_other.scales == on_one.scales);
    CHECK(equal(on_other.params, on_one.params));
    CHECK(c10::cuda::current_device() == current);
  }
}

TEST_CASE("GradScaler: losses of two devices are scaled where they are", "[cuda][devices]") {
  if (!has_two_devices()) {
    return;
  }
  GradScaler scaler(GradScalerOptions().init_scale(8.0));
  const std::vector<at::Tensor> losses{drawn({}, 1, kHere), drawn({}, 2, kThere),
                                       drawn({}, 3, kHere)};
  const auto together = scaler.scale(losses);
  for (std::size_t i = 0; i < losses.size(); ++i) {
    for (const auto& scaled : {together.at(i), scaler.scale(losses[i])}) {
      CHECK(scaled.device() == losses[i].device());
      CHECK(scaled.item<float>() == 8.0F * losses[i].item<float>());
    }
  }
}

TEST_CASE("GraphedStep: of a device that is not current, replayed on another stream",
          "[cuda][devices][graph]") {
  if (!has_two_devices()) {
    return;
  }
  std::vector<Params> results;
  for (const auto device : {kHere, kThere}) {
    const std::vector<at::Tensor> inputs{drawn({8, 4}, 1, device), drawn({8, 3}, 2, device)};
    Params params{drawn({4, 3}, 3, device).requires_grad_()};
    AdamW optimizer(params, {1e-2});
    GradScaler scaler(GradScalerOptions().init_scale(64.0));
    GraphedStep step(
        [&](const auto& given) { return at::mse_loss(given[0].mm(params[0]), given[1]); },
        optimizer, scaler, inputs, GraphedStepOptions().autocast(false));
    at::cuda::getCurrentCUDAStream(device.index()).synchronize();
    {
      const c10::cuda::CUDAStreamGuard side(c10::cuda::getStreamFromPool(false, device.index()));
      const c10::cuda::CUDAGuard current(kHere);
      for (int i = 0; i < 4; ++i) {
        step(inputs);
      }
      at::cuda::getCurrentCUDAStream(device.index()).synchronize();
    }
    results.push_back({params[0].detach().cpu()});
    CHECK(c10::cuda::current_device() == 0);
  }
  CHECK(equal(results[0], results[1]));
}
