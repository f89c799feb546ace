// SPDX-License-Identifier: Apache-2.0
// The fused steps from C++: lists of mixed dtypes against the formulas in fp64, the AmpStep,
// refusals.

#include "support/catch.h"

#include <fastamp/ops/fused_steps.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <vector>

using fastamp::ops::fused_adamw_;
using fastamp::ops::fused_sgd_;
using List = std::vector<at::Tensor>;

namespace {

constexpr double kInvScale = 1.0 / 1024;
constexpr double kClipCoef = 0.5;
constexpr double kClipValue = 0.75;

/// Two groups of parameters of all dtypes with gradients of all dtypes, and their state.
struct Model {
  List params, grads, masters, first, second, steps;

  Model() {
    for (const auto param : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const auto grad : {at::kFloat, at::kHalf, at::kBFloat16}) {
        for (const std::int64_t numel : {0, 5, 1025}) {
          params.push_back(at::randn({numel}).to(param));
          grads.push_back(at::randn({numel}).mul_(1024).to(grad));
          if (param != at::kFloat) {
            masters.push_back(params.back().to(at::kFloat));
          }
          first.push_back(at::randn({numel}));
          second.push_back(at::rand({numel}));
          steps.push_back(at::full({}, 3.0F));
        }
      }
    }
  }

  std::int64_t count() const { return static_cast<std::int64_t>(params.size()); }

  /// fp32 weights: parameters or their masters.
  List weights() const {
    List all;
    std::size_t master = 0;
    for (const auto& param : params) {
      all.push_back(param.scalar_type() == at::kFloat ? param : masters[master++]);
    }
    return all;
  }
};

List doubles(const List& list) {
  List copies;
  for (const auto& t : list) {
    copies.push_back(t.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true));
  }
  return copies;
}

at::Tensor through_amp_step(const at::Tensor& grad) {
  return grad.to(at::kDouble).mul(kInvScale).mul(kClipCoef).clamp(-kClipValue, kClipValue);
}

void check_close(const at::Tensor& got, const at::Tensor& expected) {
  REQUIRE(at::allclose(got.to(at::kDouble), expected, 1e-5, 1e-6));
}

const c10::List<bool> kNeither(std::initializer_list<bool>{false, false});

void sgd(const Model& m, float found_inf, bool write_grads = true,
         std::optional<double> clip_value = kClipValue) {
  // Momentum in the second group only: the first half of the parameters has no buffers.
  const auto half = m.count() / 2;
  const at::TensorList buffers(m.first);
  const at::TensorList steps(m.steps);
  const auto from = static_cast<std::size_t>(half);
  fused_sgd_({.params = m.params,
              .grads = m.grads,
              .momentum_buffers = buffers.slice(from),
              .momentum_steps = steps.slice(from),
              .masters = m.masters,
              .group_sizes = {half, m.count() - half},
              .lr = {0.5, 0.25},
              .momentum = {0.0, 0.9},
              .dampening = {0.0, 0.0},
              .weight_decay = {0.1, 0.0},
              .nesterov = kNeither,
              .maximize = kNeither,
              .lr_tensors = {},
              .weight_copies = {},
              .copy_of = {},
              .inv_scale = at::full({}, kInvScale),
              .clip_coef = at::full({}, kClipCoef),
              .found_inf = at::full({}, found_inf),
              .clip_value = clip_value,
              .write_grads = write_grads});
}

void adamw(const Model& m, float found_inf, bool write_grads = true) {
  const auto half = m.count() / 2;
  fused_adamw_({.params = m.params,
                .grads = m.grads,
                .exp_avgs = m.first,
                .exp_avg_sqs = m.second,
                .max_exp_avg_sqs = {},
                .state_steps = m.steps,
                .masters = m.masters,
                .group_sizes = {half, m.count() - half},
                .lr = {0.01, 0.02},
                .beta1 = {0.9, 0.4},
                .beta2 = {0.999, 0.99},
                .eps = {1e-8, 1e-3},
                .weight_decay = {0.1, 0.2},
                .decoupled = c10::List<bool>({true, false}),
                .amsgrad = kNeither,
                .maximize = kNeither,
                .lr_tensors = {},
                .weight_copies = {},
                .copy_of = {},
                .inv_scale = at::full({}, kInvScale),
                .clip_coef = at::full({}, kClipCoef),
                .found_inf = at::full({}, found_inf),
                .clip_value = kClipValue,
                .write_grads = write_grads});
}

/// Gradients as the AmpStep leaves them, and 16-bit parameters equal to their masters.
void check_gradients_and_params(const Model& m, const List& grads) {
  const auto weights = m.weights();
  for (std::size_t i = 0; i < m.params.size(); ++i) {
    const auto expected = through_amp_step(grads[i]);
    REQUIRE(at::allclose(m.grads[i].to(at::kDouble), expected, 8e-3, 1e-6));
    REQUIRE(at::equal(m.params[i], weights[i].to(m.params[i].scalar_type())));
  }
}

}  // namespace

TEST_CASE("fused_sgd: groups, dtypes and the AmpStep follow the formulas", "[ops]") {
  const Model m;
  const auto before = doubles(m.weights());
  const auto grads = doubles(m.grads);
  const auto buffers = doubles(m.first);
  sgd(m, 0.0F);
  check_gradients_and_params(m, grads);
  const auto weights = m.weights();
  for (std::size_t i = 0; i < grads.size(); ++i) {
    CAPTURE(i);
    const auto grad = through_amp_step(grads[i]);
    if (i < grads.size() / 2) {
      check_close(weights[i], before[i] - 0.5 * (grad + 0.1 * before[i]));
      REQUIRE(m.steps[i].item<float>() == 3.0F);
    } else {
      const auto buffer = 0.9 * buffers[i] + grad;
      check_close(m.first[i], buffer);
      check_close(weights[i], before[i] - 0.25 * buffer);
      REQUIRE(m.steps[i].item<float>() == 4.0F);
    }
  }
}

TEST_CASE("fused_adamw: groups, dtypes and the AmpStep follow the formulas", "[ops]") {
  const Model m;
  const auto before = doubles(m.weights());
  const auto grads = doubles(m.grads);
  const auto first = doubles(m.first);
  const auto second = doubles(m.second);
  adamw(m, 0.0F);
  check_gradients_and_params(m, grads);
  const auto weights = m.weights();
  for (std::size_t i = 0; i < grads.size(); ++i) {
    CAPTURE(i);
    const bool late = i >= grads.size() / 2;
    const double lr = late ? 0.02 : 0.01;
    const double beta1 = late ? 0.4 : 0.9;
    const double beta2 = late ? 0.99 : 0.999;
    const auto decayed = late ? before[i] : before[i] * (1 - lr * 0.1);
    const auto grad =
        late ? through_amp_step(grads[i]) + 0.2 * before[i] : through_amp_step(grads[i]);
    const auto m1 = beta1 * first[i] + (1 - beta1) * grad;
    const auto m2 = beta2 * second[i] + (1 - beta2) * grad * grad;
    const auto root = m2.sqrt() / std::sqrt(1 - std::pow(beta2, 4)) + (late ? 1e-3 : 1e-8);
    check_close(m.first[i], m1);
    check_close(m.second[i], m2);
    check_close(weights[i], decayed - lr / (1 - std::pow(beta1, 4)) * m1 / root);
    REQUIRE(m.steps[i].item<float>() == 4.0F);
  }
}

TEST_CASE("fused steps: any flag skips, and gradients are still unscaled", "[ops]") {
  for (const float flag : {1.0F, 2.0F, NAN}) {
    for (const bool adam : {false, true}) {
      const Model m;
      const auto grads = doubles(m.grads);
      List before;
      for (const auto* list : {&m.params, &m.masters, &m.first, &m.second, &m.steps}) {
        for (const auto& t : *list) {
          before.push_back(t.clone());
        }
      }
      adam ? adamw(m, flag) : sgd(m, flag);
      check_gradients_and_params(m, grads);
      std::size_t next = 0;
      for (const auto* list : {&m.params, &m.masters, &m.first, &m.second, &m.steps}) {
        for (const auto& t : *list) {
          REQUIRE(at::equal(t, before[next++]));
        }
      }
    }
  }
}

TEST_CASE("fused steps: a step without write_grads only reads gradients", "[ops]") {
  const Model m;
  List before;
  std::vector<std::int64_t> versions;
  for (const auto& grad : m.grads) {
    before.push_back(grad.clone());
    versions.push_back(grad._version());
  }
  sgd(m, 0.0F, /*write_grads=*/false);
  adamw(m, 0.0F, /*write_grads=*/false);
  for (std::size_t i = 0; i < before.size(); ++i) {
    REQUIRE(at::equal(m.grads[i], before[i]));
    REQUIRE(m.grads[i]._version() == versions[i]);
  }
}

TEST_CASE("fused steps: refused calls change nothing", "[ops]") {
  Model m;
  const auto before = m.params[1].clone();
  CHECK_THROWS_AS(sgd(m, 0.0F, true, -1.0), c10::ValueError);
  CHECK_THROWS_AS(sgd(m, 0.0F, true, NAN), c10::ValueError);
  Model short_list = m;
  short_list.masters.pop_back();
  CHECK_THROWS_AS(sgd(short_list, 0.0F), c10::ValueError);
  CHECK_THROWS_AS(adamw(short_list, 0.0F), c10::ValueError);
  Model wrong_shape = m;
  wrong_shape.grads[1] = at::ones({6});
  CHECK_THROWS_AS(sgd(wrong_shape, 0.0F), c10::ValueError);
  CHECK_THROWS_AS(adamw(wrong_shape, 0.0F), c10::ValueError);
  Model wrong_dtype = m;
  wrong_dtype.second[1] = at::ones({5}, at::kHalf);
  CHECK_THROWS_AS(adamw(wrong_dtype, 0.0F), c10::TypeError);
  Model undefined = m;
  undefined.grads[1] = at::Tensor();
  CHECK_THROWS_AS(sgd(undefined, 0.0F), c10::ValueError);
  CHECK(at::equal(m.params[1], before));
  CHECK(m.steps.back().item<float>() == 3.0F);
}
