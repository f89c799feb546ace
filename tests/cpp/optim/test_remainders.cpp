// SPDX-License-Identifier: Apache-2.0
// Masters in two bytes of the C++ optimizers: steps, checkpoints, and the conversions' bits.

#include "kernels/functors/remainder.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <tuple>
#include <type_traits>

using namespace fastamp::test;
using fastamp::optim::MasterStorage;
namespace kernels = fastamp::kernels;
namespace own = fastamp::optim;

namespace {

template <typename State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  return static_cast<State&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.view(at::kInt).equal(b.view(at::kInt));
}

/// The functor's master and remainder of each element. Widened as torch does it: on 64-bit Arm its
/// operator and c10 make another NaN of a float16's.
template <typename Half>
std::pair<at::Tensor, at::Tensor> by_functor(const at::Tensor& params,
                                             const at::Tensor& remainders) {
  const auto masters = at::empty(params.sizes(), at::kFloat);
  const auto again = at::empty(params.sizes(), at::kShort);
  const auto wide = params.to(at::kFloat);
  for (std::int64_t i = 0; i < params.numel(); ++i) {
    const float master = kernels::Remainder<Half>::master(
        wide.const_data_ptr<float>()[i], remainders.const_data_ptr<std::int16_t>()[i]);
    masters.mutable_data_ptr<float>()[i] = master;
    const float rounded = static_cast<float>(Half(master));
    again.mutable_data_ptr<std::int16_t>()[i] =
        static_cast<std::int16_t>(kernels::Remainder<Half>::of(master, rounded));
  }
  return {masters, again};
}

}  // namespace

TEMPLATE_TEST_CASE("remainders: the conversions have the bits of the functor", "[optim]",
                   at::BFloat16, at::Half) {
  constexpr auto kDtype = c10::CppTypeToScalarType<TestType>::value;
  const auto params = at::arange(-32768, 32768, at::kInt).to(at::kShort).view(kDtype);
  for (int seed = 0; seed < 4; ++seed) {
    const auto remainders = at::randint(-32768, 32768, params.sizes(), at::kShort);
    const auto [masters, again] = by_functor<TestType>(params, remainders);
    CHECK(same_bits(own::master_from_remainder(params, remainders), masters));
    CHECK(own::remainder_from_master(masters.to(kDtype), masters).equal(again));
  }
}

TEMPLATE_TEST_CASE("remainders: every step is that of a float32 master", "[optim]",
                   (std::tuple<own::SGD, own::SGDOptions, own::SGDParamState>),
                   (std::tuple<own::Adam, own::AdamOptions, own::AdamParamState>),
                   (std::tuple<own::AdamW, own::AdamWOptions, own::AdamWParamState>)) {
  using Optimizer = std::tuple_element_t<0, TestType>;
  using Options = std::tuple_element_t<1, TestType>;
  using State = std::tuple_element_t<2, TestType>;
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  auto params = make_params(dtype);
  auto copies = copy_of(params);
  Optimizer remainders(params, Options(0.01).weight_decay(0.1).master(MasterStorage::kRemainder));
  Optimizer masters(copies, Options(0.01).weight_decay(0.1));
  for (int step = 0; step < 6; ++step) {
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (remainders.state().count(params[i].unsafeGetTensorImpl()) == 0) {
        continue;
      }
      const auto joined =
          own::master_from_remainder(params[i], state_of<State>(remainders, params[i]).remainder());
      CHECK(joined.to(dtype).equal(params[i]));
      state_of<State>(masters, copies[i]).master().copy_(joined);
      copies[i].detach().copy_(params[i].detach());
    }
    set_gradients({&params, &copies});
    remainders.step();
    masters.step();
    CHECK(equal(params, copies));
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (remainders.state().count(params[i].unsafeGetTensorImpl()) == 0) {
        continue;
      }
      const auto& state = state_of<State>(remainders, params[i]);
      CHECK_FALSE(state.master().defined());
      CHECK(state.remainder().equal(
          own::remainder_from_master(copies[i], state_of<State>(masters, copies[i]).master())));
    }
  }
}

namespace {

own::AdamWOptions options_of(bool remainders) {
  return own::AdamWOptions(0.01).master(remainders ? MasterStorage::kRemainder
                                                   : MasterStorage::kFloat);
}

/// Three steps of parameters whose masters are kept so.
own::AdamW trained(Params& params, bool remainders) {
  own::AdamW optimizer(params, options_of(remainders));
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params});
    optimizer.step();
  }
  return optimizer;
}

void assign(const Params& from, const Params& to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    to[i].detach().copy_(from[i].detach());
  }
}

}  // namespace

TEST_CASE("remainders: a checkpoint continues identically", "[optim]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  auto params = make_params(dtype);
  auto copies = copy_of(params);
  auto original = trained(params, true);
  own::AdamW resumed(copies, options_of(false));
  transfer(original, resumed);
  assign(params, copies);  // After the optimizer.
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params, &copies});
    original.step();
    resumed.step();
  }
  CHECK(equal(params, copies));
}

TEST_CASE("remainders: a checkpoint's masters change to the layout of the group", "[optim]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const bool to_remainder = GENERATE(true, false);
  auto params = make_params(dtype);
  auto copies = copy_of(params);
  auto original = trained(params, !to_remainder);
  own::AdamW other(copies, options_of(false));
  transfer(original, other);
  auto& group = static_cast<own::AdamWOptions&>(other.param_groups()[0].options());
  CHECK(group.master() == (to_remainder ? MasterStorage::kFloat : MasterStorage::kRemainder));
  group.master(to_remainder ? MasterStorage::kRemainder : MasterStorage::kFloat)
      .lr(0.0)
      .weight_decay(0.0);
  assign(params, copies);
  for (const auto& copy : copies) {
    copy.mutable_grad() = at::zeros_like(copy);
  }
  other.step();
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (original.state().count(params[i].unsafeGetTensorImpl()) == 0) {
      continue;
    }
    const auto& before = state_of<own::AdamWParamState>(original, params[i]);
    const auto& after = state_of<own::AdamWParamState>(other, copies[i]);
    CHECK(after.remainder().defined() == to_remainder);
    CHECK(after.master().defined() != to_remainder);
    if (to_remainder) {
      CHECK(after.remainder().equal(own::remainder_from_master(params[i], before.master())));
    } else {
      CHECK(after.master().equal(own::master_from_remainder(params[i], before.remainder())));
    }
  }
}

TEST_CASE("remainders: a parameter set to zero is a zero with any remainder", "[optim]") {
  const auto param = at::zeros({4}, at::kBFloat16);
  CHECK(own::master_from_remainder(param, at::full_like(param, -300, at::kShort))
            .equal(at::zeros({4})));
}

TEST_CASE("remainders: what does not fit is refused", "[optim]") {
  const auto param = at::zeros({3}, at::kHalf);
  CHECK_THROWS_AS(own::master_from_remainder(param, at::zeros({3}, at::kInt)), c10::TypeError);
  CHECK_THROWS_AS(own::master_from_remainder(param, at::zeros({2}, at::kShort)), c10::ValueError);
  CHECK_THROWS_AS(own::remainder_from_master(param, at::zeros({3}, at::kHalf)), c10::TypeError);
  CHECK_THROWS_AS(own::remainder_from_master(at::zeros({3}), at::zeros({3})), c10::TypeError);
  CHECK(message_of([&] { own::remainder_from_master(param, at::zeros({2})); }) ==
        "remainder_from_master: expected master of shape [3], that of param, got [2]");
}
