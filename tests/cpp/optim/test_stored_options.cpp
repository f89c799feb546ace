// SPDX-License-Identifier: Apache-2.0
// What groups say of how state is stored decides, whatever is stored; values that are none are
// refused.

#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/full_like.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <type_traits>
#include <utility>
#include <vector>

using namespace fastamp::test;
using fastamp::optim::MasterStorage;
using fastamp::optim::MuonRate;
using fastamp::optim::StateRounding;
namespace own = fastamp::optim;

namespace {

constexpr auto kNone = static_cast<c10::ScalarType>(77);

template <typename State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  return static_cast<State&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

template <typename Options>
Options& options_of(torch::optim::Optimizer& optimizer, std::size_t group = 0) {
  return static_cast<Options&>(optimizer.param_groups().at(group).options());
}

Params matrices(at::ScalarType dtype = at::kFloat) {
  return {at::randn({64, 64}).to(dtype).requires_grad_(true),
          at::randn({3, 5}).to(dtype).requires_grad_(true)};
}

template <typename Optimizer>
void step(Optimizer& optimizer, double size = 1.0, int count = 1) {
  for (int i = 0; i < count; ++i) {
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& param : group.params()) {
        param.mutable_grad() = at::full_like(param.detach(), size);
      }
    }
    optimizer.step();
  }
}

at::ScalarType dtype_of(at::ScalarType layout, const at::Tensor& param) {
  return layout == at::kByte && param.numel() < 4096 ? at::kBFloat16 : layout;
}

template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> group_of(const Params& params, Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(params, std::make_unique<Options>(std::move(options)));
  return groups;
}

}  // namespace

TEMPLATE_TEST_CASE("moments are converted at the step after an edit of state_dtype", "[optim]",
                   (std::pair<own::Adam, own::AdamOptions>),
                   (std::pair<own::AdamW, own::AdamWOptions>)) {
  using Options = typename TestType::second_type;
  using State = std::conditional_t<std::is_same_v<Options, own::AdamOptions>, own::AdamParamState,
                                   own::AdamWParamState>;
  const auto first = GENERATE(at::kFloat, at::kBFloat16, at::kByte);
  const auto second = GENERATE(at::kFloat, at::kBFloat16, at::kByte);
  const bool amsgrad = GENERATE(false, true);
  const auto params = matrices();
  typename TestType::first_type optimizer(params,
                                          Options(1e-3).state_dtype(first).amsgrad(amsgrad));
  step(optimizer);
  options_of<Options>(optimizer).state_dtype(second);
  step(optimizer);
  for (const auto& param : params) {
    auto& state = state_of<State>(optimizer, param);
    const auto wanted = amsgrad && second == at::kByte ? at::kBFloat16 : dtype_of(second, param);
    CHECK(state.exp_avg().scalar_type() == wanted);
    CHECK(state.exp_avg_sq().scalar_type() == wanted);
    CHECK((!amsgrad || state.max_exp_avg_sq().scalar_type() == wanted));
    CHECK(state.moment_scales().defined() == (wanted == at::kByte));
    CHECK(state.steps().template item<float>() == 2.0F);
  }
}

TEST_CASE("momentum buffers are converted too", "[optim]") {
  const auto params = matrices();
  own::SGD sgd(params, own::SGDOptions(1e-3).momentum(0.9));
  own::Muon muon(params, own::MuonOptions(1e-3));
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    options_of<own::SGDOptions>(sgd).state_dtype(dtype);
    options_of<own::MuonOptions>(muon).state_dtype(dtype);
    step(sgd);
    step(muon);
    for (const auto& param : params) {
      CHECK(state_of<own::SGDParamState>(sgd, param).momentum_buffer().scalar_type() == dtype);
      CHECK(state_of<own::MuonParamState>(muon, param).momentum_buffer().scalar_type() == dtype);
    }
  }
}

TEST_CASE("second moments that became narrow follow gradients that fall", "[optim]") {
  const Params params = {at::randn({64, 64}).requires_grad_(true)};
  own::AdamW optimizer(params, own::AdamWOptions(1e-3));
  step(optimizer, 1.0, 2000);
  options_of<own::AdamWOptions>(optimizer).state_dtype(at::kBFloat16);
  step(optimizer, 0.0, 3000);
  const auto root = state_of<own::AdamWParamState>(optimizer, params[0])
                        .exp_avg_sq()
                        .to(at::kFloat)
                        .mean()
                        .sqrt()
                        .item<double>();
  CHECK(root ==
        Approx(std::sqrt((1 - std::pow(0.999, 2000)) * std::pow(0.999, 3000))).epsilon(0.1));
}

TEST_CASE("load: what groups say of how state is stored stays, and state is converted", "[optim]") {
  const auto saved = GENERATE(at::kFloat, at::kBFloat16, at::kByte);
  const auto mine = GENERATE(at::kBFloat16, at::kByte);
  const auto params = matrices();
  own::AdamW source(params, own::AdamWOptions(1e-3).state_dtype(saved));
  step(source);
  const auto copies = copy_of(params);
  own::AdamW optimizer(group_of(copies, own::AdamWOptions(1e-3).state_dtype(mine)),
                       own::AdamWOptions(1e-3));
  transfer(source, optimizer);
  CHECK(options_of<own::AdamWOptions>(optimizer).state_dtype() == mine);
  step(optimizer);
  for (const auto& param : copies) {
    CHECK(state_of<own::AdamWParamState>(optimizer, param).exp_avg().scalar_type() ==
          dtype_of(mine, param));
  }
}

TEST_CASE("load: masters and the dtype of the iteration stay, too", "[optim]") {
  const auto params = matrices(at::kBFloat16);
  own::Muon source(params, own::MuonOptions(1e-3).ns_dtype(at::kFloat));
  step(source);
  const auto copies = copy_of(params);
  own::Muon optimizer(copies,
                      own::MuonOptions(1e-3).ns_dtype(at::kHalf).master(MasterStorage::kRemainder));
  transfer(source, optimizer);
  CHECK(options_of<own::MuonOptions>(optimizer).ns_dtype() == at::kHalf);
  CHECK(options_of<own::MuonOptions>(optimizer).master() == MasterStorage::kRemainder);
  step(optimizer);
  CHECK(state_of<own::MuonParamState>(optimizer, copies[0]).remainder().defined());
}

TEST_CASE("load: where groups say nothing, the checkpoint's layout is taken", "[optim]") {
  const auto params = matrices();
  own::AdamW source(params, own::AdamWOptions(1e-3).state_dtype(at::kBFloat16));
  step(source);
  const auto copies = copy_of(params);
  own::AdamW optimizer(copies, own::AdamWOptions(1e-3));
  transfer(source, optimizer);
  CHECK(options_of<own::AdamWOptions>(optimizer).state_dtype() == at::kBFloat16);
  CHECK(state_of<own::AdamWParamState>(optimizer, copies[0])
            .exp_avg()
            .equal(state_of<own::AdamWParamState>(source, params[0]).exp_avg()));
}

namespace {

/// Every way by which an optimizer can come to such options.
template <typename Optimizer, typename State, typename Options>
void refuses(const Options& good, const Options& bad, const char* message) {
  using Catch::Matchers::Contains;
  const auto params = matrices();
  CHECK_THROWS_WITH(Optimizer(params, bad), Contains(message));
  CHECK_THROWS_WITH(Optimizer(group_of(params, bad), good), Contains(message));
  Optimizer optimizer(params, good);
  CHECK_THROWS_WITH(
      optimizer.add_param_group(group_of(Params{at::randn({2, 2}).requires_grad_(true)}, bad)[0]),
      Contains(message));
  REQUIRE(optimizer.param_groups().size() == 1);
  step(optimizer);
  Optimizer edited(params, good);
  step(edited);
  options_of<Options>(edited) = bad;
  std::stringstream stream;
  torch::save(edited, stream);
  const auto before = params[0].detach().clone();
  CHECK_THROWS_WITH(step(edited), Contains(message) && Contains("::step"));
  CHECK(before.equal(params[0].detach()));
  const auto buffers = &state_of<State>(optimizer, params[0]);
  CHECK_THROWS_WITH(torch::load(optimizer, stream), Contains(message) && Contains("::load"));
  CHECK(buffers == &state_of<State>(optimizer, params[0]));
  CHECK(options_of<Options>(optimizer) == good);
}

}  // namespace

TEST_CASE("values of options that are none are refused, and nothing changes", "[optim]") {
  const auto sgd = own::SGDOptions(0.1).momentum(0.9);
  using Sgd = own::SGDOptions;
  const auto refused_sgd = refuses<own::SGD, own::SGDParamState, Sgd>;
  refused_sgd(sgd, Sgd(sgd).state_dtype(at::kByte), "expected state_dtype to be Float or BFloat16");
  refused_sgd(sgd, Sgd(sgd).state_dtype(kNone), "expected state_dtype to be Float or BFloat16");
  refused_sgd(sgd, Sgd(sgd).master(static_cast<MasterStorage>(9)), "expected master to be kFloat");

  const own::AdamOptions adam(0.1);
  using Adam = own::AdamOptions;
  const auto refused_adam = refuses<own::Adam, own::AdamParamState, Adam>;
  refused_adam(adam, Adam(adam).state_dtype(at::kHalf), "expected state_dtype to be Float,");
  refused_adam(adam, Adam(adam).state_rounding(static_cast<StateRounding>(2)),
               "expected state_rounding to be kStochastic or kNearest, got 2");

  const own::AdamWOptions adamw(0.1);
  using AdamW = own::AdamWOptions;
  const auto refused_adamw = refuses<own::AdamW, own::AdamWParamState, AdamW>;
  refused_adamw(adamw, AdamW(adamw).master(static_cast<MasterStorage>(2)), "got 2");
  refused_adamw(adamw, AdamW(adamw).state_dtype(kNone), "expected state_dtype to be Float,");
}

TEST_CASE("values of Muon's options that are none are refused", "[optim]") {
  using Catch::Matchers::Contains;
  using Muon = own::MuonOptions;
  const std::vector<std::pair<Muon, const char*>> cases = {
      {Muon(0.1).adjust_lr_fn(static_cast<MuonRate>(4)), "expected adjust_lr_fn to be a MuonRate"},
      {Muon(0.1).ns_dtype(at::kDouble), "expected ns_dtype to be"},
      {Muon(0.1).master(static_cast<MasterStorage>(2)), "expected master to be"},
      {Muon(0.1).state_dtype(at::kByte), "expected state_dtype to be Float or BFloat16"},
  };
  for (const auto& [bad, message] : cases) {
    const auto params = matrices();
    CHECK_THROWS_WITH(own::Muon(params, bad), Contains(message));
    CHECK_THROWS_WITH(own::Muon(group_of(params, bad), Muon(0.1)), Contains(message));
    own::Muon optimizer(params, Muon(0.1));
    own::Muon edited(params, Muon(0.1));
    options_of<Muon>(edited) = bad;
    std::stringstream stream;
    torch::save(edited, stream);
    CHECK_THROWS_WITH(step(edited), Contains(message) && Contains("Muon::step"));
    CHECK_THROWS_WITH(torch::load(optimizer, stream), Contains(message) && Contains("Muon::load"));
  }
}

TEST_CASE("each of Muon's rates multiplies by its ratio", "[optim]") {
  const auto moved = [](MuonRate rate) {
    const auto param = at::randn({2, 8}).requires_grad_(true);
    const auto before = param.detach().clone();
    own::Muon optimizer(Params{param}, own::MuonOptions(0.1).weight_decay(0.0).adjust_lr_fn(rate));
    step(optimizer);
    return (before - param.detach()).norm().item<double>();
  };
  const double plain = moved(MuonRate::kNone);
  CHECK(moved(MuonRate::kOriginal) == Approx(plain).epsilon(0.01));
  CHECK(moved(MuonRate::kMatchRmsAdamW) == Approx(plain * 0.2 * std::sqrt(8.0)).epsilon(0.01));
  CHECK(moved(MuonRate::kSpectralUnclamped) == Approx(plain * 0.5).epsilon(0.01));
}
