// SPDX-License-Identifier: Apache-2.0
// Gradients whose memory runs code when it is freed; that code uses the object that freed it.

#include "helpers.h"
#include "scaler/gradient_pass.h"
#include "support/catch.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

using fastamp::GradScaler;
using fastamp::scaler::DeviceGradients;
using fastamp::scaler::PassResult;
using namespace fastamp::test;

namespace {

/// Two floats that call a function when they are freed.
at::Tensor gradient_with_end(float value, std::function<void()> at_end) {
  const auto memory = std::make_shared<std::array<float, 2>>();
  memory->fill(value);
  return at::from_blob(memory->data(), {2},
                       [memory, at_end = std::move(at_end)](void*) { at_end(); });
}

/// A parameter whose gradient calls `at_end`; only what collects the gradient will hold it, once
/// the parameter has let it go.
at::Tensor parameter_with_end(std::function<void()> at_end) {
  auto parameter = at::ones({2}).requires_grad_(true);
  parameter.mutable_grad() = gradient_with_end(8.0F, std::move(at_end));
  return parameter;
}

}  // namespace

TEST_CASE("destruction: a gradient that goes ends the pass that let it go", "[scaler]") {
  std::optional<PassResult> pass;
  int ends = 0;
  {
    DeviceGradients group{.device = c10::kCPU, .gradients = {}, .positions = {0, 1}, .arrays = {}};
    for (int i = 0; i < 2; ++i) {
      group.gradients.push_back(gradient_with_end(1.0F, [&] {
        ++ends;
        if (pass) {
          pass->forget();
        }
        std::exchange(pass, std::nullopt);
      }));
    }
    std::vector<DeviceGradients> groups;
    groups.push_back(std::move(group));
    pass.emplace(
        fastamp::scaler::unscale(std::move(groups), at::full({}, 1.0F), at::zeros({}), {}));
  }
  pass->forget();
  CHECK(ends == 2);
  CHECK_FALSE(pass.has_value());
}

TEST_CASE("destruction: a gradient that goes at the end of a step moves the scale", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0).growth_interval(1));
  int ends = 0;
  const auto parameter = parameter_with_end([&] {
    ++ends;
    scaler.update();
  });
  auto optimizer = sgd({parameter});
  scaler.unscale_(optimizer);
  parameter.mutable_grad().reset();
  scaler.step(optimizer);
  CHECK(ends == 1);
  CHECK(scaler.get_scale() == 8.0);

  parameter.mutable_grad() = at::full({2}, 8.0F);
  scaler.step(optimizer);
  CHECK(parameter[0].item<float>() == 0.0F);
}

TEST_CASE("destruction: a gradient that goes at an update begins the next iteration", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0).growth_interval(1));
  const auto other = parameter_with(16.0F);
  auto others = sgd({other});
  std::unique_ptr<torch::optim::SGD> optimizer;
  at::Tensor parameter = parameter_with_end([&] {
    parameter.mutable_grad() = at::full({2}, 16.0F);
    scaler.unscale_(*optimizer);
    scaler.unscale_(others);
  });
  optimizer = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{parameter},
                                                  torch::optim::SGDOptions(1.0));
  scaler.unscale_(*optimizer);
  parameter.mutable_grad().reset();
  scaler.update();
  CHECK(parameter.grad()[0].item<float>() == 2.0F);
  CHECK(other.grad()[0].item<float>() == 2.0F);
  scaler.step(*optimizer);
  scaler.step(others);
  scaler.update();
  CHECK(parameter[0].item<float>() == -1.0F);
  CHECK(scaler.get_scale() == 16.0);
}

TEST_CASE("destruction: a gradient that goes while others are unscaled ends the iteration",
          "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0).keep_scaled_grads(true).fuse(true));
  int ends = 0;
  const auto parameter = parameter_with_end([&] {
    ++ends;
    scaler.update();
  });
  auto optimizer = sgd({parameter});
  scaler.clip_grad_norm_(optimizer, 1.0);  // A pass that the next one takes the place of.
  parameter.mutable_grad() = at::full({2}, 8.0F);
  scaler.clip_grad_norm_(optimizer, 1.0);
  CHECK(ends == 1);
  scaler.unscale_(optimizer);
  CHECK(parameter.grad()[0].item<float>() <= 2.0F);
}
