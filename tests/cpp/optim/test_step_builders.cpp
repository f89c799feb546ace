// SPDX-License-Identifier: Apache-2.0
#include "optim/step_lists.h"
#include "support/catch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <vector>

using fastamp::optim::AdamGroup;
using fastamp::optim::AdamStep;
using fastamp::optim::AmpStep;
using fastamp::optim::SgdGroup;
using fastamp::optim::SgdStep;

namespace {

const auto kMetaOptions = at::TensorOptions(at::kMeta);

/// A parameter with all the state that a step can ask for.
struct Slot {
  explicit Slot(const at::Tensor& value, at::ScalarType grad_dtype = at::kFloat)
      : param(value.clone()),
        grad(at::randn(value.sizes(), value.options().dtype(at::kFloat)).to(grad_dtype)),
        first(at::zeros(value.sizes(), value.options().dtype(at::kFloat))),
        second(at::zeros_like(first)),
        step(at::zeros({}, first.options())),
        master(value.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true)) {}

  at::Tensor param, grad, first, second, step, master;
};

void add(SgdStep& step, const Slot& slot) {
  step.add(slot.param, slot.grad, slot.first, slot.step, slot.master);
}

void add(AdamStep& step, const Slot& slot) {
  step.add(slot.param, slot.grad, slot.first, slot.second, at::Tensor(), slot.step, slot.master);
}

SgdGroup sgd_group(double lr, double momentum = 0.0) {
  SgdGroup group;
  group.lr = lr;
  group.momentum = momentum;
  return group;
}

}  // namespace

TEST_CASE("SgdStep: groups with and without momentum, dtypes mixed, in one call", "[optim]") {
  Slot plain(at::randn({7}));
  Slot half(at::randn({5}).to(at::kHalf), at::kBFloat16);
  Slot heavy(at::randn({3, 4}), at::kHalf);
  const auto before_plain = plain.param.clone();
  const auto before_half = half.master.clone();
  const auto before_heavy = heavy.param.clone();
  SgdStep step;
  step.begin_group(sgd_group(0.5), 2);
  add(step, plain);
  add(step, half);
  step.begin_group(sgd_group(1.0), 4);  // A group none of whose parameters has a gradient.
  step.begin_group(sgd_group(0.25, 0.9), 1);
  add(step, heavy);
  step.run({});
  CHECK(plain.param.equal(before_plain - plain.grad * 0.5));
  CHECK(plain.step.item<float>() == 0.0F);
  CHECK(half.master.equal(before_half - half.grad.to(at::kFloat) * 0.5));
  CHECK(half.param.equal(half.master.to(at::kHalf)));
  CHECK(heavy.first.equal(heavy.grad.to(at::kFloat)));
  CHECK(heavy.param.equal(before_heavy - heavy.grad.to(at::kFloat) * 0.25));
  CHECK(heavy.step.item<float>() == 1.0F);
}

TEST_CASE("SgdStep: the AmpStep unscales, clips, skips and may leave gradients alone", "[optim]") {
  Slot slot(at::zeros({4}));
  slot.grad.fill_(8.0);
  AmpStep amp_step;
  amp_step.inv_scale = at::full({}, 0.5);
  amp_step.clip_coef = at::full({}, 0.25);
  amp_step.write_grads = GENERATE(true, false);
  const bool overflow = GENERATE(true, false);
  amp_step.found_inf = at::full({}, overflow ? 2.0 : 0.0);
  SgdStep step;
  step.begin_group(sgd_group(1.0), 1);
  add(step, slot);
  step.run(amp_step);
  CHECK(slot.param.equal(at::full({4}, overflow ? 0.0 : -1.0)));
  CHECK(slot.grad.equal(at::full({4}, amp_step.write_grads ? 1.0 : 8.0)));
}

TEST_CASE("steps: a learning rate may be a tensor in one group and a number in another",
          "[optim]") {
  Slot with_tensor(at::zeros({4}));
  Slot with_number(at::zeros({4}));
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf);
  auto group = sgd_group(100.0);
  group.lr_tensor = at::scalar_tensor(0.5, at::TensorOptions(dtype));
  SgdStep step;
  step.begin_group(group, 1);
  add(step, with_tensor);
  step.begin_group(sgd_group(0.25), 1);
  add(step, with_number);
  step.run({});
  CHECK(with_tensor.param.equal(with_tensor.grad * -0.5));
  CHECK(with_number.param.equal(with_number.grad * -0.25));
}

TEST_CASE("AdamStep: each group has its own rules", "[optim]") {
  Slot adam(at::randn({6}));
  Slot adamw(adam.param);
  adamw.grad = adam.grad.clone();
  const auto start = adam.param.to(at::kDouble);
  AdamGroup group;
  group.lr = 0.1;
  group.weight_decay = 0.5;
  AdamStep step;
  step.begin_group(group, 1);
  add(step, adam);
  group.decoupled = true;
  step.begin_group(group, 1);
  add(step, adamw);
  step.run({});
  const auto reference = [&](const at::Tensor& weight, const at::Tensor& grad) {
    return weight - grad / (grad.abs() + 1e-8) * 0.1;  // The first step of Adam.
  };
  const auto grad = adam.grad.to(at::kDouble);
  CHECK(adam.param.to(at::kDouble).allclose(reference(start, grad + start * 0.5), 1e-5, 1e-6));
  CHECK(adamw.param.to(at::kDouble).allclose(reference(start * 0.95, grad), 1e-5, 1e-6));
  CHECK(adam.step.item<float>() == 1.0F);
}

TEST_CASE("steps: parameters on several devices, one op for each", "[optim]") {
  Slot here(at::zeros({4}));
  Slot there(at::zeros({4}, kMetaOptions));
  Slot back(at::zeros({2}));
  AmpStep amp_step;
  amp_step.inv_scale = at::full({}, 0.5);
  amp_step.found_inf = at::zeros({});
  SgdStep step;
  step.begin_group(sgd_group(1.0), 3);
  add(step, here);
  add(step, there);
  add(step, back);
  SECTION("all are stepped") {
    const auto grad = here.grad.clone();
    step.run(amp_step);
    CHECK(here.param.equal(grad * -0.5));
    CHECK(back.param.ne(0).all().item<bool>());
  }
  SECTION("a refusal on one device leaves the others alone") {
    Slot wrong(at::zeros({4}, kMetaOptions));
    wrong.grad = at::zeros({3}, kMetaOptions);
    add(step, wrong);
    CHECK_THROWS_AS(step.run(amp_step), c10::ValueError);
    CHECK(here.param.equal(at::zeros({4})));
  }
}

TEST_CASE("steps: nothing to step is no error", "[optim]") {
  SgdStep empty;
  CHECK_NOTHROW(empty.run({}));
  AdamStep without_parameters;
  without_parameters.begin_group({}, 10);
  CHECK_NOTHROW(without_parameters.run({}));
}

TEST_CASE("steps: missing state is refused by name and changes nothing", "[optim]") {
  Slot slot(at::zeros({4}).to(at::kHalf));
  SgdStep sgd;
  sgd.begin_group(sgd_group(1.0, 0.9), 1);
  sgd.add(slot.param, slot.grad, at::Tensor(), slot.step, slot.master);
  CHECK_THROWS_AS(sgd.run({}), c10::ValueError);
  AdamStep adam;
  adam.begin_group({}, 1);
  adam.add(slot.param, slot.grad, slot.first, slot.second, at::Tensor(), slot.step, at::Tensor());
  CHECK_THROWS_AS(adam.run({}), c10::ValueError);
  CHECK(slot.param.equal(at::zeros({4}).to(at::kHalf)));
  CHECK(slot.step.item<float>() == 0.0F);
}

TEST_CASE("SgdStep: borrowed tensors are given back", "[optim]") {
  Slot slot(at::zeros({4}));
  const auto uses = slot.param.use_count();
  {
    SgdStep step;
    step.begin_group(sgd_group(1.0), 1);
    add(step, slot);
    CHECK(slot.param.use_count() == uses);
    step.run({});
  }
  CHECK(slot.param.use_count() == uses);
  CHECK(slot.grad.use_count() == 1);
}
