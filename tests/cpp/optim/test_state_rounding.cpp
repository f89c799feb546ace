// SPDX-License-Identifier: Apache-2.0
// bfloat16 second moments of the C++ optimizers: which noise rounds them, and what is saved of it.

#include "kernels/functors/noise.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/amp_step.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>

#include <utility>

using namespace fastamp::test;
using fastamp::optim::StateRounding;
namespace kernels = fastamp::kernels;
namespace own = fastamp::optim;

namespace {

template <typename Optimizer>
auto& state_of(Optimizer& optimizer, const at::Tensor& param) {
  using State = std::conditional_t<std::is_same_v<Optimizer, own::Adam>, own::AdamParamState,
                                   own::AdamWParamState>;
  return static_cast<State&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

/// What the parameter with that number has after a step, of the exact values.
at::Tensor rounded(const at::Tensor& exact, std::size_t number, float steps) {
  const auto noise =
      kernels::Noise::at(static_cast<std::uint64_t>(kernels::noise_origin(number)), steps);
  auto result = at::empty(exact.sizes(), exact.options().dtype(at::kBFloat16));
  const auto* from = exact.const_data_ptr<float>();
  auto* to = result.mutable_data_ptr<at::BFloat16>();
  for (std::int64_t i = 0; i < exact.numel(); ++i) {
    to[i].x = kernels::round_stochastically(from[i], noise(static_cast<std::uint32_t>(i)));
  }
  return result;
}

void give_gradients(const Params& params) {
  for (const auto& param : params) {
    param.mutable_grad() = at::randn(param.sizes());
  }
}

}  // namespace

TEMPLATE_TEST_CASE("second moments are rounded by the noise of their parameter's number", "[optim]",
                   (std::pair<own::Adam, own::AdamOptions>),
                   (std::pair<own::AdamW, own::AdamWOptions>)) {
  using Optimizer = typename TestType::first_type;
  using Options = typename TestType::second_type;
  Params params;
  for (int i = 0; i < 5; ++i) {
    params.push_back(at::randn({300}).requires_grad_(true));
  }
  auto copies = copy_of(params);
  auto options = Options(0.01).amsgrad(true).state_dtype(at::kBFloat16);
  const auto nearest = Options(options).state_rounding(StateRounding::kNearest).betas({0.9, 0.9});
  Optimizer optimizer(two_groups(params, nearest), options);
  Optimizer exact(two_groups(copies, Options(0.01).amsgrad(true).betas({0.9, 0.9})),
                  Options(0.01).amsgrad(true));
  give_gradients(params);
  params[3].mutable_grad() = at::Tensor();  // Counts all the same.
  for (std::size_t i = 0; i < params.size(); ++i) {
    copies[i].mutable_grad() = params[i].grad();
  }
  optimizer.step();
  exact.step();
  for (const std::size_t i : {std::size_t{0}, std::size_t{2}, std::size_t{4}}) {
    const auto& mine = state_of(optimizer, params[i]);
    const auto& wide = state_of(exact, copies[i]);
    CHECK(mine.exp_avg().equal(wide.exp_avg().to(at::kBFloat16)));
    for (const auto& [narrow, expected] :
         {std::pair{mine.exp_avg_sq(), wide.exp_avg_sq()},
          std::pair{mine.max_exp_avg_sq(), wide.max_exp_avg_sq()}}) {
      const auto to_nearest = expected.to(at::kBFloat16);
      CHECK(narrow.equal(i < 2 ? to_nearest : rounded(expected, i, 0.0F)));
      CHECK(narrow.equal(to_nearest) == (i < 2));
    }
  }
}

TEST_CASE("a skipped step draws nothing, and a resumed run goes on with the same bits", "[optim]") {
  auto params = make_params();
  auto copies = copy_of(params);
  const auto options = own::AdamWOptions(0.01).amsgrad(true).state_dtype(at::kBFloat16);
  own::AdamW original(params, options);
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params});
    original.step();
  }
  own::AdamW resumed(copies, own::AdamWOptions(1.0).state_rounding(StateRounding::kNearest));
  transfer(original, resumed);
  const auto& loaded = static_cast<own::AdamWOptions&>(resumed.param_groups()[0].options());
  CHECK(loaded.state_rounding() == StateRounding::kStochastic);
  for (std::size_t i = 0; i < params.size(); ++i) {
    copies[i].detach().copy_(params[i].detach());
  }
  set_gradients({&params});
  own::AmpStep amp_step;
  amp_step.found_inf = at::ones({});
  original.set_amp_step(amp_step);
  original.step();
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params, &copies});
    original.step();
    resumed.step();
  }
  CHECK(equal(params, copies));
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto key = params[i].unsafeGetTensorImpl();
    if (original.state().count(key) != 0) {
      CHECK(state_of(original, params[i])
                .exp_avg_sq()
                .equal(state_of(resumed, copies[i]).exp_avg_sq()));
    }
  }
}

TEST_CASE("state_rounding distinguishes options", "[optim]") {
  CHECK_FALSE(own::AdamOptions(0.1) ==
              own::AdamOptions(0.1).state_rounding(StateRounding::kNearest));
  CHECK_FALSE(own::AdamWOptions(0.1) ==
              own::AdamWOptions(0.1).state_rounding(StateRounding::kNearest));
}
