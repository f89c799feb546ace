// SPDX-License-Identifier: Apache-2.0
// Moments in 8 bits of the C++ optimizers: layouts, conversions, checkpoints, bad input.

#include "optim/encoded_moments.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/optim/stored_state.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/serialize.h>

#include <sstream>

using namespace fastamp::test;
namespace own = fastamp::optim;

namespace {

own::AdamWParamState& state_of(const own::AdamW& optimizer, const at::Tensor& param) {
  return static_cast<own::AdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

Params two_params() {
  return {at::randn({64, 96}).requires_grad_(true), at::randn({7}).requires_grad_(true)};
}

/// The same gradient for the n-th parameter of each list.
void give_gradients(const Params& params, const Params& copies = {}) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto gradient = at::randn(params[i].sizes());
    params[i].mutable_grad() = gradient.clone();
    if (!copies.empty()) {
      copies[i].mutable_grad() = gradient.clone();
    }
  }
}

own::AdamWOptions in_8_bits() { return own::AdamWOptions(0.01).state_dtype(at::kByte); }

}  // namespace

TEST_CASE("matrices have codes, others bfloat16 moments", "[optim]") {
  const auto params = two_params();
  own::AdamW optimizer(params, in_8_bits());
  for (int step = 0; step < 3; ++step) {
    give_gradients(params);
    optimizer.step();
  }
  const auto& codes = state_of(optimizer, params[0]);
  CHECK(codes.exp_avg().scalar_type() == at::kByte);
  CHECK(codes.exp_avg_sq().scalar_type() == at::kByte);
  CHECK(codes.moment_scales().sizes() == at::IntArrayRef{64, 3, 2});
  const auto& small = state_of(optimizer, params[1]);
  CHECK(small.exp_avg().scalar_type() == at::kBFloat16);
  CHECK_FALSE(small.moment_scales().defined());
}

TEST_CASE("codes decode to float32's moments but for their last bits", "[optim]") {
  const auto params = two_params();
  const auto copies = copy_of(params);
  own::AdamW optimizer(params, in_8_bits());
  own::AdamW exact(copies, own::AdamWOptions(0.01));
  give_gradients(params, copies);
  optimizer.step();
  exact.step();
  const auto& codes = state_of(optimizer, params[0]);
  const auto& wide = state_of(exact, copies[0]);
  const auto [first, second] =
      own::decode_moments({codes.exp_avg(), codes.exp_avg_sq(), codes.moment_scales()});
  const auto greatest = wide.exp_avg().abs().max();
  CHECK(((first - wide.exp_avg()).abs() <= 0.0626 * wide.exp_avg().abs() + greatest * 1e-4)
            .all()
            .item<bool>());
  CHECK(((second / wide.exp_avg_sq() - 1).abs() <= 0.126).all().item<bool>());
  // The first step is that of float32.
  CHECK(params[0].equal(copies[0]));
}

TEST_CASE("a resumed run of 8-bit moments has the bits of one that went on", "[optim]") {
  const auto params = two_params();
  const auto copies = copy_of(params);
  own::AdamW original(params, in_8_bits());
  for (int step = 0; step < 3; ++step) {
    give_gradients(params);
    original.step();
  }
  own::AdamW resumed(copies, own::AdamWOptions(1.0));
  transfer(original, resumed);
  for (std::size_t i = 0; i < params.size(); ++i) {
    copies[i].detach().copy_(params[i].detach());
  }
  for (int step = 0; step < 3; ++step) {
    give_gradients(params, copies);
    original.step();
    resumed.step();
  }
  CHECK(equal(params, copies));
  const auto& mine = state_of(original, params[0]);
  const auto& other = state_of(resumed, copies[0]);
  CHECK(mine.exp_avg().equal(other.exp_avg()));
  CHECK(mine.exp_avg_sq().equal(other.exp_avg_sq()));
  CHECK(mine.moment_scales().equal(other.moment_scales()));
}

TEST_CASE("LibTorch's optimizers find no moments in an archive of codes", "[optim]") {
  const auto params = two_params();
  own::AdamW original(params, in_8_bits());
  give_gradients(params);
  original.step();
  std::stringstream file;
  torch::save(original, file);
  const auto copies = copy_of(params);
  torch::optim::AdamW torchs(copies);
  torch::load(torchs, file);
  give_gradients(copies);
  CHECK_THROWS(torchs.step());
}

TEST_CASE("a layout that changes in between is converted", "[optim]") {
  const auto params = two_params();
  own::AdamW optimizer(params, in_8_bits());
  auto& options = static_cast<own::AdamWOptions&>(optimizer.param_groups()[0].options());
  give_gradients(params);
  optimizer.step();
  const auto& codes = state_of(optimizer, params[0]);
  const auto before =
      own::decode_moments({codes.exp_avg(), codes.exp_avg_sq(), codes.moment_scales()});
  for (const auto& param : params) {
    param.mutable_grad().zero_();
  }
  SECTION("to float32") { options.state_dtype(at::kFloat); }
  SECTION("to bfloat16, for amsgrad") { options.amsgrad(true); }
  optimizer.step();
  const auto& changed = state_of(optimizer, params[0]);
  const bool amsgrad = options.amsgrad();
  CHECK(changed.exp_avg().scalar_type() == (amsgrad ? at::kBFloat16 : at::kFloat));
  CHECK(changed.max_exp_avg_sq().defined() == amsgrad);
  CHECK_FALSE(changed.moment_scales().defined());
  CHECK(changed.exp_avg().to(at::kFloat).allclose(0.9 * before.first, 1e-2, 0.0));
  options.state_dtype(at::kByte).amsgrad(false);
  optimizer.step();
  CHECK(state_of(optimizer, params[0]).moment_scales().defined());
}

TEST_CASE("what a checkpoint has in float32 is loaded as codes", "[optim]") {
  const auto params = two_params();
  const auto copies = copy_of(params);
  torch::optim::AdamW torchs(params, torch::optim::AdamWOptions(0.01));
  give_gradients(params, copies);
  torchs.step();
  own::AdamW optimizer(copies, in_8_bits());
  transfer(torchs, optimizer);
  CHECK(state_of(optimizer, copies[0]).moment_scales().defined());
  CHECK(state_of(optimizer, copies[1]).exp_avg().scalar_type() == at::kBFloat16);
  optimizer.step();
}

TEST_CASE("moments in 8 bits: bad input", "[optim]") {
  const auto params = two_params();
  CHECK_THAT(
      message_of(
          [&] { own::SGD(params, own::SGDOptions(0.1).momentum(0.9).state_dtype(at::kByte)); }),
      Catch::Matchers::Contains("SGD: expected state_dtype to be Float or BFloat16, got Byte"));
  CHECK_THAT(message_of([&] { own::AdamW(params, own::AdamWOptions().state_dtype(at::kHalf)); }),
             Catch::Matchers::Contains(
                 "AdamW: expected state_dtype to be Float, BFloat16 or Byte, got Half"));
  const auto codes = at::zeros({4, 64}, at::kByte);
  CHECK_THAT(
      message_of([&] { own::decode_moments({codes, codes, at::zeros({4, 3, 2}, at::kByte)}); }),
      Catch::Matchers::Contains("decode_moments: expected codes of one"));
  CHECK_THAT(message_of([&] { own::encode_moments(at::ones({4, 48}), at::ones({4, 48}), 32); }),
             Catch::Matchers::Contains("encode_moments: expected a group of 32"));
  // A state that somebody has put together wrongly is refused before anything is changed.
  own::AdamW optimizer(params, in_8_bits());
  give_gradients(params);
  optimizer.step();
  state_of(optimizer, params[0]).moment_scales(at::zeros({64, 2, 2}, at::kByte));
  const auto before = copy_of(params);
  CHECK_THROWS_AS(optimizer.step(), c10::ValueError);
  CHECK(equal(params, before));
}
