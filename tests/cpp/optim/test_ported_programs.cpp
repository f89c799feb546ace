// SPDX-License-Identifier: Apache-2.0
// Programs written for LibTorch's optimizers, in which nothing but the optimizer's name changes.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
namespace own = fastamp::optim;
namespace libtorch = torch::optim;

namespace {

/// What a program for one of LibTorch's optimizers names: its options and states.
template <typename Torchs, typename Options, typename State, typename Own>
struct Port {
  using TorchOptimizer = Torchs;
  using TorchOptions = Options;
  using TorchState = State;
  using OwnOptimizer = Own;
};

using Sgd = Port<libtorch::SGD, libtorch::SGDOptions, libtorch::SGDParamState, own::SGD>;
using Adam = Port<libtorch::Adam, libtorch::AdamOptions, libtorch::AdamParamState, own::Adam>;
using AdamW = Port<libtorch::AdamW, libtorch::AdamWOptions, libtorch::AdamWParamState, own::AdamW>;

template <typename Options>
Options options_with(double lr) {
  Options options(lr);
  options.weight_decay(0.1);
  if constexpr (std::is_same_v<Options, libtorch::SGDOptions>) {
    options.momentum(0.9).dampening(0.3);
  } else {
    options.betas({0.8, 0.95}).amsgrad(true);
  }
  return options;
}

/// SGD's arithmetic is torch's; Adam's differs in the last bits.
template <typename Options>
constexpr double kTolerance = std::is_same_v<Options, libtorch::SGDOptions> ? 0.0 : 8.0;

template <typename Options>
struct Outcome {
  Params params;
  std::vector<double> rates;
  Options options = Options(0.0);
};

/// The program. Gradients are a function of the step, so that both runs see the same.
template <typename Optimizer, typename Options>
Outcome<Options> program(const Params& start) {
  Outcome<Options> outcome;
  auto& params = outcome.params = copy_of(start);
  std::vector<libtorch::OptimizerParamGroup> groups;
  groups.emplace_back(Params{params[0], params[1]},
                      std::make_unique<Options>(options_with<Options>(0.05)));
  groups.emplace_back(Params{params[2]});
  Optimizer optimizer(groups, options_with<Options>(0.1));
  optimizer.add_param_group(libtorch::OptimizerParamGroup(
      Params{params[3]}, std::make_unique<Options>(options_with<Options>(0.2))));
  libtorch::Optimizer& base = optimizer;
  base.add_param_group(libtorch::OptimizerParamGroup(
      Params{params[4]}, std::make_unique<Options>(options_with<Options>(0.3))));
  base.add_param_group(libtorch::OptimizerParamGroup(Params{params[5]}));

  libtorch::StepLR schedule(optimizer, 4, 0.5);
  libtorch::ReduceLROnPlateauScheduler plateau(optimizer, libtorch::ReduceLROnPlateauScheduler::min,
                                               0.5F, 2);
  for (int step = 0; step < 12; ++step) {
    at::manual_seed(static_cast<std::uint64_t>(step));
    for (auto& param : params) {
      param.mutable_grad() = at::randn(param.sizes());
    }
    if (step == 3) {  // As warm-ups in many programs: the cast, then the option.
      for (auto& group : optimizer.param_groups()) {
        static_cast<Options&>(group.options()).lr(0.07);
      }
    }
    if (step == 5) {
      auto& options = dynamic_cast<Options&>(optimizer.param_groups()[2].options());
      options.weight_decay(0.3);
      optimizer.param_groups()[1].set_options(
          std::make_unique<Options>(options_with<Options>(0.02)));
    }
    optimizer.step();
    schedule.step();
    plateau.step(1.0F);
    for (const auto& group : optimizer.param_groups()) {
      outcome.rates.push_back(static_cast<const Options&>(group.options()).lr());
      outcome.rates.push_back(group.options().get_lr());
    }
  }
  outcome.options = static_cast<Options&>(optimizer.defaults());
  return outcome;
}

template <typename Options>
const Options& options_of(const libtorch::Optimizer& optimizer, std::size_t group) {
  return dynamic_cast<const Options&>(optimizer.param_groups().at(group).options());
}

}  // namespace

TEMPLATE_TEST_CASE("a ported program: groups, casts of options, schedulers", "[optim]", Sgd, Adam,
                   AdamW) {
  using Options = typename TestType::TorchOptions;
  const auto start = make_params();
  const auto expected = program<typename TestType::TorchOptimizer, Options>(start);
  const auto got = program<typename TestType::OwnOptimizer, Options>(start);
  CHECK(got.rates == expected.rates);
  CHECK(got.options == expected.options);
  CHECK(difference(got.params, expected.params) <= kTolerance<Options>);
}

TEMPLATE_TEST_CASE("a ported program: its options are the optimizer's defaults", "[optim]", Sgd,
                   Adam, AdamW) {
  using Options = typename TestType::TorchOptions;
  auto params = make_params();
  const auto options = options_with<Options>(0.25);
  const typename TestType::OwnOptimizer optimizer(params, options);
  CHECK(dynamic_cast<const Options&>(optimizer.defaults()) == options);
  CHECK(options_of<Options>(optimizer, 0) == options);
  const libtorch::OptimizerOptions& base = optimizer.param_groups()[0].options();
  const auto copy = base.clone();
  const auto& copied = *copy;
  CHECK(typeid(copied) == typeid(base));
  CHECK(dynamic_cast<const Options&>(copied) == options);
}

TEMPLATE_TEST_CASE("a ported program: torch::save and torch::load", "[optim]", Sgd, Adam, AdamW) {
  using Options = typename TestType::TorchOptions;
  using Optimizer = typename TestType::OwnOptimizer;
  const auto with_torch_group = [](const Params& params, double lr) {
    std::vector<libtorch::OptimizerParamGroup> groups;
    groups.emplace_back(params, std::make_unique<Options>(options_with<Options>(lr)));
    return groups;
  };
  auto params = make_params();
  auto copies = copy_of(params);
  Optimizer original(with_torch_group(params, 0.05), options_with<Options>(0.1));
  Optimizer resumed(with_torch_group(copies, 0.9), options_with<Options>(0.8));
  // LibTorch's own options put there by hand are saved and loaded, too.
  original.param_groups()[0].set_options(std::make_unique<Options>(options_with<Options>(0.03)));
  resumed.param_groups()[0].set_options(std::make_unique<Options>(options_with<Options>(0.7)));
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params});
    original.step();
  }
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < params.size(); ++i) {
      copies[i].copy_(params[i]);
    }
  }
  transfer(original, resumed);
  CHECK(options_of<Options>(resumed, 0).lr() == 0.03);
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params, &copies});
    original.step();
    resumed.step();
  }
  CHECK(equal(params, copies));
}

TEMPLATE_TEST_CASE("a ported program: states are LibTorch's", "[optim]", Sgd, Adam, AdamW) {
  using State = typename TestType::TorchState;
  auto params = Params{at::randn({7}).requires_grad_(true)};
  auto reference = copy_of(params);
  const auto options = options_with<typename TestType::TorchOptions>(0.1);
  typename TestType::OwnOptimizer mine(params, options);
  typename TestType::TorchOptimizer torchs(reference, options);
  for (int step = 0; step < 3; ++step) {
    at::manual_seed(static_cast<std::uint64_t>(step));
    params[0].mutable_grad() = at::randn({7});
    reference[0].mutable_grad() = params[0].grad().clone();
    mine.step();
    torchs.step();
  }
  const auto& left = dynamic_cast<State&>(*mine.state().at(params[0].unsafeGetTensorImpl()));
  const auto& right = dynamic_cast<State&>(*torchs.state().at(reference[0].unsafeGetTensorImpl()));
  const libtorch::OptimizerParamState& base = left;
  const auto copy = base.clone();
  const auto& copied = *copy;
  CHECK(typeid(copied) == typeid(base));
  if constexpr (std::is_same_v<State, libtorch::SGDParamState>) {
    CHECK(left.momentum_buffer().equal(right.momentum_buffer()));
  } else {
    CHECK(left.step() == right.step());
    CHECK(left.exp_avg().allclose(right.exp_avg(), 1e-5, 1e-6));
    CHECK(left.exp_avg_sq().allclose(right.exp_avg_sq(), 1e-5, 1e-6));
    CHECK(left.max_exp_avg_sq().allclose(right.max_exp_avg_sq(), 1e-5, 1e-6));
  }
}

TEST_CASE("options: setters of both kinds return fastamp's, copies keep what it adds", "[optim]") {
  const auto options =
      own::AdamWOptions(0.5).betas({0.5, 0.75}).eps(0.1).amsgrad(true).maximize(true);
  CHECK(options.get_lr() == 0.5);
  CHECK(options.maximize());
  const libtorch::OptimizerOptions& base = options;
  const auto copy = base.clone();
  const auto& copied = dynamic_cast<own::AdamWOptions&>(*copy);
  CHECK(copied == options);
  CHECK(copied.betas() == std::make_tuple(0.5, 0.75));
  copy->set_lr(0.25);
  CHECK(copied.lr() == 0.25);
  CHECK_FALSE(copied == options);
  CHECK_FALSE(own::AdamWOptions(options).maximize(false) == options);
  CHECK(own::SGDOptions(libtorch::SGDOptions(0.5).momentum(0.9)).nesterov(true).momentum() == 0.9);
}

TEST_CASE("groups with LibTorch's options have fastamp's from the defaults", "[optim]") {
  auto params = Params{at::randn({3}).requires_grad_(true)};
  std::vector<libtorch::OptimizerParamGroup> groups;
  groups.emplace_back(params, std::make_unique<libtorch::AdamOptions>(0.25));
  const own::Adam optimizer(
      groups, own::AdamOptions(0.5).maximize(true).state_dtype(at::kBFloat16).betas({0.9, 0.9}));
  const auto& options = options_of<own::AdamOptions>(optimizer, 0);
  CHECK(options.lr() == 0.25);
  CHECK(options.maximize());
  CHECK(options.state_dtype() == at::kBFloat16);
}

TEST_CASE("set_options with LibTorch's: the step reads them, and fastamp's from the defaults",
          "[optim]") {
  const bool maximize = GENERATE(false, true);
  auto params = Params{at::ones({3}).requires_grad_(true)};
  params[0].mutable_grad() = at::ones({3});
  own::SGD optimizer(params, own::SGDOptions(1.0).maximize(maximize));
  auto& group = optimizer.param_groups()[0];
  group.set_options(std::make_unique<libtorch::SGDOptions>(0.5));
  auto& held = static_cast<libtorch::SGDOptions&>(group.options());
  optimizer.step();
  CHECK(params[0].equal(at::full({3}, maximize ? 1.5 : 0.5)));
  held.lr(0.25);  // The object is still the one that the program put there.
  optimizer.step();
  CHECK(params[0].equal(at::full({3}, maximize ? 1.75 : 0.25)));
  group.set_options(std::make_unique<libtorch::AdamOptions>(0.5));
  CHECK_THROWS_AS(optimizer.step(), c10::TypeError);
}

TEMPLATE_TEST_CASE("LibTorch's step count of a state is right after skips and refusals", "[optim]",
                   Adam, AdamW) {
  auto params = Params{at::ones({3}).requires_grad_(true), at::ones({3}).requires_grad_(true)};
  for (auto& param : params) {
    param.mutable_grad() = at::ones({3});
  }
  typename TestType::OwnOptimizer optimizer(params);
  const auto count = [&](std::size_t i) {
    const auto& state = *optimizer.state().at(params[i].unsafeGetTensorImpl());
    return static_cast<const typename TestType::TorchState&>(state).step();
  };
  const auto step_with_flag = [&](double flag) {
    fastamp::optim::AmpStep amp_step;
    amp_step.found_inf = at::full({1}, flag);
    optimizer.set_amp_step(amp_step);
    optimizer.step();
  };
  step_with_flag(2.0);
  CHECK(count(0) == 0);
  optimizer.step();
  CHECK(count(0) == 1);
  step_with_flag(1.0);
  CHECK(count(0) == 1);
  step_with_flag(0.0);
  CHECK(count(0) == 2);
  params[1].mutable_grad() = at::ones({3}).to_sparse();
  CHECK_THROWS_AS(optimizer.step(), c10::Error);
  CHECK(count(0) == 2);
  CHECK(count(1) == 2);
  typename TestType::OwnOptimizer resumed(params);
  transfer(optimizer, resumed);
  const auto& state = *resumed.state().at(params[0].unsafeGetTensorImpl());
  CHECK(static_cast<const typename TestType::TorchState&>(state).step() == 2);
}

TEMPLATE_TEST_CASE("LibTorch's step count moves once for a parameter that is listed twice",
                   "[optim]", Adam, AdamW) {
  const auto tied = at::ones({3}).requires_grad_(true);
  tied.mutable_grad() = at::ones({3});
  typename TestType::OwnOptimizer optimizer(Params{tied, tied});
  for (std::int64_t i = 1; i <= 3; ++i) {
    optimizer.step();
    const auto& state = *optimizer.state().at(tied.unsafeGetTensorImpl());
    CHECK(static_cast<const typename TestType::TorchState&>(state).step() == i);
  }
}
