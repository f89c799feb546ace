// SPDX-License-Identifier: Apache-2.0
// Gradients that come twice: parameters listed twice, parameters that share a gradient.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/full_like.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/module.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers

namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

enum class Kind { kTorch, kFused, kFastamp };

Optimizer sgd_over(Kind kind, const std::vector<at::Tensor>& parameters) {
  if (kind == Kind::kFastamp) {
    return std::make_unique<fastamp::optim::SGD>(parameters, fastamp::optim::SGDOptions(1.0));
  }
  auto result = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(1.0));
  if (kind == Kind::kFused) {
    fastamp::optim::fuse_(*result);
  }
  return result;
}

struct Layer : torch::nn::Module {
  Layer() : weight(register_parameter("weight", at::ones({2, 2}))) {}
  at::Tensor weight;
};

/// Two names of one layer, as tied weights are written.
struct Tied : torch::nn::Module {
  Tied() {
    register_module("encoder", layer);
    register_module("decoder", layer);
  }
  std::shared_ptr<Layer> layer = std::make_shared<Layer>();
};

double first(const at::Tensor& tensor) { return tensor.detach().reshape({-1})[0].item<double>(); }

}  // namespace

TEST_CASE("unscale_: a module registered twice is unscaled once", "[scaler]") {
  const auto kind = GENERATE(Kind::kTorch, Kind::kFused, Kind::kFastamp);
  Tied model;
  REQUIRE(model.parameters().size() == 2);
  const auto optimizer = sgd_over(kind, model.parameters());
  auto scaler = started(cpu_options().init_scale(65536.0));
  for (const auto& parameter : model.parameters()) {
    parameter.mutable_grad() = at::full_like(parameter, 65536.0);
  }
  scaler.unscale_(*optimizer);
  CHECK(first(model.layer->weight.grad()) == 1.0);
}

TEST_CASE("step: a tied weight is stepped once by fused steps, twice by LibTorch's", "[scaler]") {
  const auto kind = GENERATE(Kind::kTorch, Kind::kFused, Kind::kFastamp);
  const bool by_group = GENERATE(false, true);
  auto weight = parameter_with(8.0F, 5000);
  auto other = parameter_with(8.0F, 3);
  const auto optimizer = sgd_over(kind, {weight, other, weight});
  if (by_group) {
    auto options = optimizer->param_groups()[0].options().clone();
    optimizer->param_groups()[0].params().pop_back();
    optimizer->param_groups().emplace_back(std::vector<at::Tensor>{weight}, std::move(options));
  }
  auto scaler = started(cpu_options().init_scale(4.0));
  scaler.step(*optimizer);
  scaler.update();
  CHECK(weight.detach().eq(kind == Kind::kTorch ? -3.0 : -1.0).all().item<bool>());
  CHECK(other.detach().eq(-1.0).all().item<bool>());
  CHECK(weight.grad().eq(2.0).all().item<bool>());
  CHECK(scaler.history()[0].norm == Approx(std::sqrt(4.0 * 5003.0)).margin(1e-3));
}

TEST_CASE("clip_grad_norm_: a gradient listed twice counts and is clipped once", "[scaler]") {
  const auto kind = GENERATE(Kind::kTorch, Kind::kFused, Kind::kFastamp);
  const double norm_type = GENERATE(2.0, 1.0);
  const bool enabled = GENERATE(true, false);
  const float scale = enabled ? 4.0F : 1.0F;
  auto weight = parameter_with(3.0F * scale, 1);
  auto other = parameter_with(4.0F * scale, 1);
  const auto optimizer = sgd_over(kind, {weight, other, weight});
  auto scaler = started(cpu_options().init_scale(4.0).enabled(enabled));
  const double norm = norm_type == 2.0 ? 5.0 : 7.0;
  const auto clipped = scaler.clip_grad_norm_(*optimizer, norm / 2, norm_type);
  CHECK(clipped.item<double>() == Approx(norm).margin(1e-6));
  scaler.step(*optimizer);
  CHECK(first(weight.grad()) == Approx(1.5).margin(1e-5));
  CHECK(first(other.grad()) == Approx(2.0).margin(1e-5));
}

TEST_CASE("step: parameters that share a gradient are each stepped by it", "[scaler]") {
  const auto kind = GENERATE(Kind::kTorch, Kind::kFused, Kind::kFastamp);
  const auto clip = GENERATE(0, 1, 2);
  const bool unscaled = GENERATE(false, true);
  std::vector<at::Tensor> parameters{parameter_with(12.0F, 1), parameter_with(0.0F, 1),
                                     parameter_with(16.0F, 1)};
  parameters[1].mutable_grad() = parameters[0].grad();
  const auto optimizer = sgd_over(kind, parameters);
  auto scaler = started(cpu_options().init_scale(4.0));
  if (unscaled) {
    scaler.unscale_(*optimizer);
  }
  if (clip == 1) {
    CHECK(scaler.clip_grad_norm_(*optimizer, 2.5).item<double>() == Approx(5.0).margin(1e-6));
  } else if (clip == 2) {
    scaler.clip_grad_value_(*optimizer, 2.0);
  }
  scaler.step(*optimizer);
  scaler.update();
  const double shared = clip == 0 ? 3.0 : clip == 1 ? 1.5 : 2.0;
  CHECK(1.0 - first(parameters[0]) == Approx(shared).margin(1e-5));
  CHECK(1.0 - first(parameters[1]) == Approx(shared).margin(1e-5));
  CHECK(1.0 - first(parameters[2]) == Approx(clip == 0 ? 4.0 : 2.0).margin(1e-5));
  CHECK(first(parameters[0].grad()) == Approx(shared).margin(1e-5));
  CHECK(scaler.history()[0].norm == Approx(5.0).margin(1e-6));
}

TEST_CASE("step: gradients of one's own after shared ones are unscaled in memory", "[scaler]") {
  const auto kind = GENERATE(Kind::kTorch, Kind::kFused, Kind::kFastamp);
  std::vector<at::Tensor> parameters{parameter_with(4.0F, 1), parameter_with(0.0F, 1)};
  parameters[1].mutable_grad() = parameters[0].grad();
  const auto optimizer = sgd_over(kind, parameters);
  auto scaler = started(cpu_options().init_scale(4.0));
  for (int i = 0; i < 2; ++i) {
    scaler.step(*optimizer);
    scaler.update();
    CHECK(first(parameters[0].grad()) == 1.0);
    CHECK(first(parameters[1].grad()) == 1.0);
    for (auto& parameter : parameters) {
      parameter.mutable_grad() = at::full({1}, 4.0);
    }
  }
}

TEST_CASE("unscale_: a sparse gradient that comes twice is unscaled once", "[scaler]") {
  const bool shared = GENERATE(false, true);
  auto table = at::ones({4}).requires_grad_(true);
  auto second = shared ? at::ones({4}).requires_grad_(true) : table;
  const auto indices = at::tensor({1, 1}, at::kLong).reshape({1, 2});
  table.mutable_grad() = at::sparse_coo_tensor(indices, at::tensor({8.0F, 24.0F}), {4});
  second.mutable_grad() = table.grad();
  const auto optimizer = sgd_over(Kind::kTorch, {table, second});
  auto scaler = started(cpu_options().init_scale(4.0));
  scaler.unscale_(*optimizer);
  CHECK(table.grad().to_dense()[1].item<float>() == 8.0F);
  CHECK(second.grad().is_same(table.grad()));
}

TEST_CASE("step: a sparse gradient of a parameter listed twice is stepped once", "[scaler]") {
  const auto kind = GENERATE(Kind::kFused, Kind::kFastamp);
  auto table = at::ones({4}).requires_grad_(true);
  const auto indices = at::tensor({1, 1}, at::kLong).reshape({1, 2});
  table.mutable_grad() = at::sparse_coo_tensor(indices, at::tensor({8.0F, 24.0F}), {4});
  const auto optimizer = sgd_over(kind, {table, table});
  auto scaler = started(cpu_options().init_scale(4.0));
  scaler.step(*optimizer);
  CHECK(table[1].item<float>() == -7.0F);
}

TEST_CASE("overflow_report: a gradient that comes twice is reported once", "[scaler]") {
  const auto kind = GENERATE(Kind::kTorch, Kind::kFastamp);
  auto weight = parameter_with(std::numeric_limits<float>::infinity());
  const auto optimizer = sgd_over(kind, {weight, parameter_with(1.0F), weight});
  auto scaler = started(cpu_options());
  scaler.step(*optimizer);
  scaler.update();
  const auto report = scaler.overflow_report();
  REQUIRE(report.gradients.size() == 1);
  CHECK(report.gradients[0].index == 0);
  CHECK(report.gradients[0].inf == 2);
}
