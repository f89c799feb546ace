// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>

using fastamp::GradScaler;
using fastamp::test::cpu_options;
using fastamp::test::parameter_with;
using fastamp::test::sgd;
using fastamp::test::started;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float first_of(const at::Tensor& tensor) { return tensor.flatten()[0].item<float>(); }

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace

TEST_CASE("scale: multiplies, differentiates and promotes a 0-d half", "[scaler]") {
  GradScaler scaler(cpu_options().init_scale(8.0));
  auto weight = at::ones({3}).requires_grad_(true);
  scaler.scale(weight.sum()).backward();
  CHECK(first_of(weight.grad()) == 8.0F);

  const auto half = at::full({}, 2.0, at::kHalf);
  CHECK(scaler.scale(half).scalar_type() == at::kFloat);
  CHECK(scaler.scale(half.reshape({1})).scalar_type() == at::kHalf);

  const auto several = scaler.scale(std::vector<at::Tensor>{half, at::ones({2})});
  REQUIRE(several.size() == 2);
  CHECK(first_of(several[1]) == 8.0F);
}

TEST_CASE("step: unscales and applies finite gradients", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(2.0F);
  auto optimizer = sgd({parameter});
  const auto result = scaler.step(optimizer);
  CHECK(result.has_value());
  CHECK(first_of(parameter.grad()) == 0.5F);
  CHECK(first_of(parameter) == 0.5F);
  scaler.update();
  CHECK(scaler.get_scale() == 4.0);
}

TEST_CASE("step: skips on any non-finite gradient and lowers the scale", "[scaler]") {
  const auto bad =
      GENERATE(as<float>{}, kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN());
  auto scaler = started(cpu_options().init_scale(4.0));
  auto good = parameter_with(1.0F);
  auto parameter = parameter_with(1.0F, 17);
  parameter.mutable_grad()[16] = bad;
  auto optimizer = sgd({good, parameter});
  CHECK_FALSE(scaler.step(optimizer).has_value());
  CHECK(first_of(good) == 1.0F);
  scaler.update();
  CHECK(scaler.get_scale() == 2.0);
}

TEST_CASE("several optimizers share one scale: one overflow lowers it once", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto good = parameter_with(4.0F);
  auto bad = parameter_with(kInfinity);
  auto worse = parameter_with(kInfinity);
  auto first = sgd({good});
  auto second = sgd({bad});
  auto third = sgd({worse});
  CHECK(scaler.step(first).has_value());
  CHECK_FALSE(scaler.step(second).has_value());
  CHECK_FALSE(scaler.step(third).has_value());
  scaler.update();
  CHECK(scaler.get_scale() == 2.0);
  CHECK(first_of(good) == 0.0F);
}

TEST_CASE("all parameter groups are unscaled, absent gradients passed over", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(2.0));
  auto first = parameter_with(2.0F);
  auto second = parameter_with(2.0F);
  auto none = at::ones({2}).requires_grad_(true);
  auto optimizer = sgd({first, none});
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({second}, std::make_unique<torch::optim::SGDOptions>(1.0)));
  scaler.unscale_(optimizer);
  CHECK(first_of(first.grad()) == 1.0F);
  CHECK(first_of(second.grad()) == 1.0F);
  CHECK_FALSE(none.grad().defined());
}

TEST_CASE("calls out of order are refused", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(2.0F);
  auto optimizer = sgd({parameter});
  SECTION("unscale_ twice") {
    scaler.unscale_(optimizer);
    CHECK(message_of([&] { scaler.unscale_(optimizer); }).find("already been called on this") !=
          std::string::npos);
    CHECK(first_of(parameter.grad()) == 0.5F);
    CHECK(scaler.step(optimizer).has_value());
  }
  SECTION("unscale_ after step, step twice") {
    scaler.step(optimizer);
    CHECK(message_of([&] { scaler.unscale_(optimizer); }).find("after step()") !=
          std::string::npos);
    CHECK(message_of([&] { scaler.step(optimizer); }).find("already been called since") !=
          std::string::npos);
    CHECK(first_of(parameter) == 0.5F);
    scaler.update();
    CHECK(scaler.step(optimizer).has_value());
  }
  SECTION("update without a step") {
    CHECK(message_of([&] { scaler.update(); }).find("No inf checks were recorded prior") !=
          std::string::npos);
    CHECK(scaler.get_scale() == 4.0);
  }
  SECTION("a closure") {
    const auto closure = [] { return at::ones({}); };
    CHECK_THROWS_AS(scaler.step(optimizer, closure), c10::Error);
    CHECK(scaler.step(optimizer).has_value());
  }
  SECTION("an optimizer without gradients, until it has some") {
    parameter.mutable_grad().reset();
    CHECK(message_of([&] { scaler.step(optimizer); }).find("recorded for this optimizer") !=
          std::string::npos);
    parameter.mutable_grad() = at::full({2}, 4.0);
    CHECK(scaler.step(optimizer).has_value());
  }
  SECTION("before scale()") {
    GradScaler fresh(cpu_options());
    CHECK_THROWS_AS(fresh.unscale_(optimizer), c10::Error);
    CHECK_THROWS_AS(fresh.step(optimizer), c10::Error);
    CHECK_THROWS_AS(fresh.update(), c10::Error);
    CHECK(first_of(parameter.grad()) == 2.0F);
  }
}

TEST_CASE("an fp16 gradient is refused before any gradient changes", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(2.0F);
  auto half = at::ones({2}, at::kHalf).requires_grad_(true);
  half.mutable_grad() = at::ones({2}, at::kHalf);
  auto optimizer = sgd({parameter, half});
  CHECK_THROWS_AS(scaler.unscale_(optimizer), c10::ValueError);
  CHECK(message_of([&] { scaler.step(optimizer); }).find("got float16") != std::string::npos);
  CHECK(first_of(parameter.grad()) == 2.0F);
}

TEST_CASE("update: a new scale replaces the old one and keeps the growth count", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0).growth_interval(2));
  auto parameter = parameter_with(1.0F);
  auto optimizer = sgd({parameter});
  scaler.step(optimizer);
  scaler.update();
  scaler.update(16.0);
  CHECK(scaler.get_scale() == 16.0);
  scaler.update(at::full({}, 32.0));
  CHECK(scaler.get_scale() == 32.0);
  scaler.step(optimizer);
  scaler.update();
  CHECK(scaler.get_scale() == 64.0);
}

TEST_CASE("update: tensors that cannot be a scale are refused", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  CHECK_THROWS_AS(scaler.update(at::ones({2})), c10::Error);
  CHECK_THROWS_AS(scaler.update(at::ones({}).requires_grad_(true)), c10::Error);
  CHECK_THROWS_AS(scaler.update(at::ones({}, at::TensorOptions().device(at::kMeta))), c10::Error);
  CHECK(scaler.get_scale() == 4.0);
}

TEST_CASE("a disabled scaler passes everything through", "[scaler]") {
  GradScaler scaler(cpu_options().enabled(false).growth_factor(0.5));
  CHECK_FALSE(scaler.is_enabled());
  const auto loss = at::ones({});
  CHECK(scaler.scale(loss).is_same(loss));
  auto parameter = parameter_with(kInfinity);
  auto optimizer = sgd({parameter});
  scaler.unscale_(optimizer);
  CHECK(scaler.step(optimizer, [] { return at::full({}, 7.0); })->item<float>() == 7.0F);
  scaler.update();
  scaler.update(3.0);
  CHECK(scaler.get_scale() == 1.0);
  CHECK(scaler.get_scale_async() == 1.0);
  CHECK_FALSE(scaler.underflow_report());
  CHECK_FALSE(scaler.state().has_value());
  CHECK(std::isinf(first_of(parameter)));
}

TEST_CASE("a moved scaler goes on where it was", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(4.0));
  auto parameter = parameter_with(kInfinity);
  auto optimizer = sgd({parameter});
  scaler.step(optimizer);
  GradScaler moved = std::move(scaler);
  moved.update();
  CHECK(moved.get_scale() == 2.0);
}

TEST_CASE("a scaler whose first scale() is in inference mode trains outside of it", "[scaler]") {
  GradScaler scaler(cpu_options().init_scale(4.0).history_size(2).hysteresis(2));
  const auto fresh = scaler.state();
  {
    const c10::InferenceMode inference;
    scaler.scale(at::ones({}));
    scaler.load_state(fresh);
  }
  auto parameter = parameter_with(kInfinity);
  auto optimizer = sgd({parameter});
  for (int i = 0; i < 2; ++i) {
    scaler.unscale_(optimizer);
    scaler.step(optimizer);
    scaler.update();
  }
  CHECK(scaler.get_scale() == 2.0);
  CHECK(scaler.history().size() == 2);
}
