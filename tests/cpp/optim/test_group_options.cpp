// SPDX-License-Identifier: Apache-2.0
// Options that a parameter group ends up with: LibTorch's versions differ, fastamp follows the one
// that is loaded.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <utility>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
namespace own = fastamp::optim;
namespace libtorch = torch::optim;

namespace {

at::Tensor parameter() { return at::randn({2}).requires_grad_(true); }

/// An optimizer with three groups: without options, with options, and with options added later.
template <typename Optimizer, typename Options>
Optimizer with_groups(const Options& defaults, const Options& given) {
  std::vector<libtorch::OptimizerParamGroup> groups;
  groups.emplace_back(Params{parameter()});
  groups.emplace_back(Params{parameter()}, std::make_unique<Options>(given));
  Optimizer optimizer(groups, defaults);
  optimizer.add_param_group(
      libtorch::OptimizerParamGroup(Params{parameter()}, std::make_unique<Options>(given)));
  return optimizer;
}

template <typename Options>
const Options& options_of(const libtorch::Optimizer& optimizer, std::size_t group) {
  return static_cast<const Options&>(optimizer.param_groups().at(group).options());
}

template <typename Options>
Options sgd_options(double lr, double momentum, double dampening, double weight_decay,
                    bool nesterov) {
  return Options(lr)
      .momentum(momentum)
      .dampening(dampening)
      .weight_decay(weight_decay)
      .nesterov(nesterov);
}

template <typename Options>
Options adam_options(double lr, double beta, double eps, double weight_decay, bool amsgrad) {
  return Options(lr).betas({beta, 0.999}).eps(eps).weight_decay(weight_decay).amsgrad(amsgrad);
}

template <typename Own, typename OwnOptions, typename Torchs, typename TorchsOptions>
void compare_adam() {
  const double lr = GENERATE(1e-3, 0.3);
  const double beta = GENERATE(0.9, 0.3);
  const double eps = GENERATE(1e-8, 0.3);
  const double weight_decay = GENERATE(0.0, 1e-2, 0.3);
  const bool amsgrad = GENERATE(false, true);
  const auto mine =
      with_groups<Own>(adam_options<OwnOptions>(0.5, 0.5, 0.5, 0.5, !amsgrad),
                       adam_options<OwnOptions>(lr, beta, eps, weight_decay, amsgrad));
  const auto torchs =
      with_groups<Torchs>(adam_options<TorchsOptions>(0.5, 0.5, 0.5, 0.5, !amsgrad),
                          adam_options<TorchsOptions>(lr, beta, eps, weight_decay, amsgrad));
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& left = options_of<OwnOptions>(mine, i);
    const auto& right = options_of<TorchsOptions>(torchs, i);
    CHECK(left.lr() == right.lr());
    CHECK(left.betas() == right.betas());
    CHECK(left.eps() == right.eps());
    CHECK(left.weight_decay() == right.weight_decay());
    CHECK(left.amsgrad() == right.amsgrad());
  }
}

/// Whether LibTorch fills in what a group leaves alone, seen by Adam (the library asks SGD).
bool torch_inherits() {
  const auto probe = with_groups<libtorch::Adam>(libtorch::AdamOptions(0.5).amsgrad(true),
                                                 libtorch::AdamOptions(0.25));
  return options_of<libtorch::AdamOptions>(probe, 1).amsgrad();
}

}  // namespace

TEST_CASE("SGD: the options of groups are those that LibTorch's have", "[optim]") {
  const double lr = GENERATE(1e-3, 0.3);
  const double momentum = GENERATE(0.0, 0.3);
  const double dampening = GENERATE(0.0, 0.3);
  const double weight_decay = GENERATE(0.0, 0.3);
  const bool nesterov = GENERATE(false, true);
  const bool default_nesterov = GENERATE(false, true);
  const auto defaults = [&]<typename Options>(Options*) {
    return sgd_options<Options>(0.5, 0.5, default_nesterov ? 0.0 : 0.5, 0.5, default_nesterov);
  };
  const auto given = [&]<typename Options>(Options*) {
    return sgd_options<Options>(lr, momentum, dampening, weight_decay, nesterov);
  };
  own::SGDOptions* const our = nullptr;
  libtorch::SGDOptions* const their = nullptr;
  const auto mine = with_groups<own::SGD>(defaults(our), given(our));
  const auto torchs = with_groups<libtorch::SGD>(defaults(their), given(their));
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& left = options_of<own::SGDOptions>(mine, i);
    const auto& right = options_of<libtorch::SGDOptions>(torchs, i);
    CHECK(left.lr() == right.lr());
    CHECK(left.momentum() == right.momentum());
    CHECK(left.dampening() == right.dampening());
    CHECK(left.weight_decay() == right.weight_decay());
    CHECK(left.nesterov() == right.nesterov());
  }
}

TEST_CASE("Adam: the options of groups are those that LibTorch's have", "[optim]") {
  compare_adam<own::Adam, own::AdamOptions, libtorch::Adam, libtorch::AdamOptions>();
}

TEST_CASE("AdamW: the options of groups are those that LibTorch's have", "[optim]") {
  compare_adam<own::AdamW, own::AdamWOptions, libtorch::AdamW, libtorch::AdamWOptions>();
}

TEST_CASE("the options that only fastamp's have follow the same rule", "[optim]") {
  const auto defaults = own::AdamOptions(0.5)
                            .maximize(true)
                            .state_dtype(at::kBFloat16)
                            .state_rounding(own::StateRounding::kNearest)
                            .autocast_dtype(at::kHalf);
  const bool inherited = torch_inherits();
  SECTION("left alone") {
    const auto optimizer = with_groups<own::Adam>(defaults, own::AdamOptions(0.25));
    for (const std::size_t i : {std::size_t{1}, std::size_t{2}}) {
      const auto& options = options_of<own::AdamOptions>(optimizer, i);
      CHECK(options.maximize() == inherited);
      CHECK(options.state_dtype() == (inherited ? at::kBFloat16 : at::kFloat));
      CHECK((options.state_rounding() == own::StateRounding::kNearest) == inherited);
      CHECK(options.autocast_dtype() == (inherited ? at::kHalf : at::ScalarType::Undefined));
    }
  }
  SECTION("set") {
    const auto optimizer = with_groups<own::Adam>(own::AdamOptions(0.5),
                                                  own::AdamOptions(0.25)
                                                      .maximize(true)
                                                      .state_dtype(at::kBFloat16)
                                                      .state_rounding(own::StateRounding::kNearest)
                                                      .autocast_dtype(at::kHalf));
    for (const std::size_t i : {std::size_t{1}, std::size_t{2}}) {
      const auto& options = options_of<own::AdamOptions>(optimizer, i);
      CHECK(options.maximize());
      CHECK(options.state_dtype() == at::kBFloat16);
      CHECK(options.state_rounding() == own::StateRounding::kNearest);
      CHECK(options.autocast_dtype() == at::kHalf);
    }
  }
}

TEST_CASE("groups with another optimizer's options are refused", "[optim]") {
  const auto with = [](std::unique_ptr<libtorch::OptimizerOptions> options) {
    std::vector<libtorch::OptimizerParamGroup> groups;
    groups.emplace_back(Params{parameter()}, std::move(options));
    return groups;
  };
  for (const auto& groups : {with(std::make_unique<libtorch::SGDOptions>(0.5)),
                             with(std::make_unique<own::SGDOptions>(0.5))}) {
    CHECK_NOTHROW(own::SGD(groups, own::SGDOptions(0.5)));
    CHECK_THROWS_AS(own::Adam(groups), c10::TypeError);
    CHECK_THROWS_AS(own::AdamW(groups), c10::TypeError);
  }
  for (const auto& groups : {with(std::make_unique<libtorch::AdamWOptions>(0.5)),
                             with(std::make_unique<own::AdamWOptions>(0.5))}) {
    CHECK_THROWS_AS(own::SGD(groups, own::SGDOptions(0.5)), c10::TypeError);
    CHECK_THROWS_AS(own::Adam(groups), c10::TypeError);
    CHECK_NOTHROW(own::AdamW(groups));
  }
  own::SGD optimizer(Params{parameter()}, own::SGDOptions(0.5));
  const auto groups = with(std::make_unique<libtorch::AdamOptions>(0.5));
  CHECK(message_of([&] { optimizer.add_param_group(groups[0]); }) ==
        "SGD::add_param_group: expected a parameter group with options of type "
        "fastamp::optim::SGDOptions or torch::optim::SGDOptions, got torch::optim::AdamOptions");
  CHECK(optimizer.param_groups().size() == 1);
}

TEST_CASE("groups with an undefined parameter are refused", "[optim]") {
  const Params params{parameter(), at::Tensor()};
  const std::string text =
      ": expected defined tensors as parameters, got an undefined one at position 1 of its group";
  CHECK(message_of([&] { own::SGD(params, own::SGDOptions(0.5)); }) == "SGD" + text);
  CHECK(message_of([&] { const own::Adam optimizer(params); }) == "Adam" + text);
  CHECK(message_of([&] { const own::AdamW optimizer(params); }) == "AdamW" + text);
  own::AdamW optimizer(Params{parameter()});
  const libtorch::OptimizerParamGroup group(params);
  CHECK_THROWS_AS(optimizer.add_param_group(group), c10::ValueError);
  CHECK(message_of([&] { optimizer.add_param_group(group); }) == "AdamW::add_param_group" + text);
  CHECK(optimizer.param_groups().size() == 1);
}

namespace {

/// Counts warnings and remembers the last one.
class CountingHandler : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    ++count;
    last = warning.msg();
  }
  int count = 0;
  std::string last;
};

}  // namespace

TEMPLATE_TEST_CASE("bfloat16 moments that cannot follow their beta warn once", "[optim]",
                   (std::pair<own::Adam, own::AdamOptions>),
                   (std::pair<own::AdamW, own::AdamWOptions>)) {
  using Optimizer = typename TestType::first_type;
  using Options = typename TestType::second_type;
  CountingHandler handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  const auto stochastic = Options(0.5).state_dtype(at::kBFloat16);
  const auto narrow = Options(stochastic).state_rounding(own::StateRounding::kNearest);
  auto optimizer = with_groups<Optimizer>(Options(0.5), Options(0.25));
  CHECK(handler.count == 0);
  optimizer.add_param_group(
      libtorch::OptimizerParamGroup(Params{parameter()}, std::make_unique<Options>(narrow)));
  CHECK(handler.count == 1);
  CHECK(handler.last.find("::add_param_group: state_dtype kBFloat16 with state_rounding kNearest "
                          "cannot follow betas[1] = 0.999") != std::string::npos);
  const Optimizer another(Params{parameter()}, narrow);
  CHECK(handler.count == 2);
  CHECK(handler.last.find("Use state_rounding kStochastic, or betas[1] <= 0.99.") !=
        std::string::npos);
  const Optimizer follows(Params{parameter()}, Options(narrow).betas({0.9, 0.99}));
  const Optimizer unbiased(Params{parameter()}, stochastic);
  CHECK(handler.count == 2);
}
