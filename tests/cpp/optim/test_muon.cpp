// SPDX-License-Identifier: Apache-2.0
// fastamp::optim::Muon against the algorithm written out in torch's operators; AmpSteps, masters,
// remainders, checkpoints and what is refused.

#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/grad_scaler.h>

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <map>

using namespace fastamp::test;
using fastamp::optim::MasterStorage;
using fastamp::optim::Muon;
using fastamp::optim::MuonOptions;
using fastamp::optim::MuonParamState;
using fastamp::optim::MuonRate;

namespace {

Params matrices(at::ScalarType dtype = at::kFloat) {
  Params params;
  for (const auto& shape :
       std::vector<std::vector<std::int64_t>>{{4, 6}, {16, 16}, {4, 6}, {9, 3}, {1, 5}, {16, 16}}) {
    params.push_back(at::randn(shape).to(dtype).requires_grad_(true));
  }
  params.push_back(at::randn({6, 4}).t().to(dtype).requires_grad_(true));
  return params;
}

/// torch.optim.Muon, written from its formulas, one matrix after the other.
class Reference {
 public:
  Reference(Params& params, const MuonOptions& options) : params_(params), options_(options) {}

  void step() {
    const at::NoGradGuard no_grad;
    for (const auto& param : params_) {
      const at::Tensor grad = param.grad();
      if (!grad.defined()) {
        continue;
      }
      auto& buffer = buffers_[param.unsafeGetTensorImpl()];
      buffer = buffer.defined() ? buffer : at::zeros_like(grad);
      buffer.lerp_(grad, 1 - options_.momentum());
      const auto update = options_.nesterov() ? grad.lerp(buffer, options_.momentum()) : buffer;
      param.mul_(1 - options_.lr() * options_.weight_decay());
      param.add_(orthogonal(update), -options_.lr() * ratio(param));
    }
  }

 private:
  at::Tensor orthogonal(const at::Tensor& update) const {
    const bool tall = update.size(0) > update.size(1);
    auto x = update.to(at::kBFloat16, false, /*copy=*/true);
    x = tall ? x.t() : x;
    x.div_(x.norm().clamp_min(options_.eps()));
    const auto [a, b, c] = options_.ns_coefficients();
    for (std::int64_t i = 0; i < options_.ns_steps(); ++i) {
      const auto gram = x.mm(x.t());
      x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
    }
    return tall ? x.t() : x;
  }
  double ratio(const at::Tensor& param) const {
    const auto rows = static_cast<double>(param.size(0));
    const auto columns = static_cast<double>(param.size(1));
    return options_.adjust_lr_fn() == MuonRate::kOriginal
               ? std::sqrt(std::max(1.0, rows / columns))
               : 0.2 * std::sqrt(std::max(rows, columns));
  }

  Params& params_;
  MuonOptions options_;
  std::map<void*, at::Tensor> buffers_;
};

MuonParamState& state_of(Muon& optimizer, const at::Tensor& param) {
  return static_cast<MuonParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

/// Products of bfloat16 are summed in another order where a library has other code for batches: an
/// element of the orthogonal matrix, at most about 1.2, is then off by some units of bfloat16.
void check_close(const Params& mine, const Params& others, double lr) {
  for (std::size_t i = 0; i < mine.size(); ++i) {
    CHECK((mine[i] - others[i]).abs().max().item<double>() <= 0.05 * lr);
  }
}

}  // namespace

TEST_CASE("Muon follows the formulas of torch.optim.Muon", "[optim]") {
  const bool nesterov = GENERATE(true, false);
  const auto rate = GENERATE(MuonRate::kOriginal, MuonRate::kMatchRmsAdamW);
  const auto options =
      MuonOptions(0.02).nesterov(nesterov).adjust_lr_fn(rate).momentum(0.9).weight_decay(0.2);
  auto params = matrices();
  auto copies = copy_of(params);
  Muon optimizer(params, options);
  Reference reference(copies, options);
  for (int step = 0; step < 6; ++step) {
    set_gradients({&params, &copies});
    optimizer.step();
    reference.step();
    check_close(params, copies, 0.02);
    for (std::size_t i = 0; i < params.size(); ++i) {
      copies[i].detach().copy_(params[i].detach());
    }
  }
}

TEST_CASE("Muon behind a scaler: unscaled, clipped, skipped after an overflow", "[optim]") {
  auto params = matrices();
  auto copies = copy_of(params);
  Muon optimizer(params, MuonOptions(0.02));
  Muon plain(copies, MuonOptions(0.02));
  fastamp::GradScaler scaler(fastamp::GradScalerOptions().init_scale(1024.0).device(c10::kCPU));
  for (int step = 0; step < 4; ++step) {
    const bool overflows = step == 1;
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto gradient = at::randn(params[i].sizes());
      params[i].mutable_grad() = gradient * scaler.get_scale();  // a power of two
      copies[i].mutable_grad() = gradient.clone();
    }
    if (overflows) {
      params[2].mutable_grad()[0][0] = std::numeric_limits<float>::infinity();
    }
    static_cast<void>(scaler.scale(at::ones({})));
    scaler.step(optimizer);
    scaler.update();
    if (!overflows) {
      plain.step();
    }
    CHECK(equal(params, copies));
    for (std::size_t i = 0; i < params.size() && step > 0; ++i) {
      CHECK(state_of(optimizer, params[i])
                .momentum_buffer()
                .equal(state_of(plain, copies[i]).momentum_buffer()));
    }
  }
}

TEST_CASE("Muon keeps masters and remainders of 16-bit matrices", "[optim]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  auto params = matrices(dtype);
  Params wide;
  for (const auto& param : params) {
    wide.push_back(param.detach().to(at::kFloat).requires_grad_(true));
  }
  auto others = copy_of(params);
  Muon optimizer(params, MuonOptions(0.01));
  Muon reference(wide, MuonOptions(0.01));
  Muon remainders(others, MuonOptions(0.01).master(MasterStorage::kRemainder));
  for (int step = 0; step < 5; ++step) {
    set_gradients({&params, &others});
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto& grad = params[i].grad();
      wide[i].mutable_grad() = grad.defined() ? grad.to(at::kFloat) : at::Tensor();
    }
    optimizer.step();
    reference.step();
    remainders.step();
    for (std::size_t i = 0; i < params.size(); ++i) {
      CHECK(params[i].equal(wide[i].to(dtype)));
      if (optimizer.state().count(params[i].unsafeGetTensorImpl()) != 0) {
        CHECK(state_of(optimizer, params[i]).master().equal(wide[i]));
        CHECK_FALSE(state_of(remainders, others[i]).master().defined());
      }
      // Ties between two bfloat16 are one unit of float32 off, and then stay so.
      CHECK((others[i].to(at::kFloat) - params[i].to(at::kFloat)).abs().max().item<float>() <
            0.04F);
    }
  }
}

TEST_CASE("Muon: a checkpoint continues bit for bit", "[optim]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto storage = GENERATE(MasterStorage::kFloat, MasterStorage::kRemainder);
  const auto options = MuonOptions(0.01).master(storage).state_dtype(at::kBFloat16).ns_steps(3);
  auto params = matrices(dtype);
  Muon original(params, options);
  for (int step = 0; step < 2; ++step) {
    set_gradients({&params});
    original.step();
  }
  auto copies = copy_of(params);
  Muon resumed(copies, MuonOptions(0.5));
  transfer(original, resumed);
  for (int step = 0; step < 3; ++step) {
    set_gradients({&params, &copies});
    original.step();
    resumed.step();
  }
  CHECK(equal(params, copies));
  const auto& loaded = static_cast<const MuonOptions&>(resumed.param_groups()[0].options());
  CHECK(loaded.ns_steps() == 3);
  CHECK(loaded.lr() == 0.01);
}

TEST_CASE("Muon: each dtype of the iteration brings singular values near 1", "[optim]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf, at::kFloat);
  const double size = GENERATE(1e-7, 1.0, 1e6);  // float16 has neither the least nor the greatest
  auto param = at::zeros({8, 24}).requires_grad_(true);
  Muon optimizer(Params{param}, MuonOptions(1.0).ns_dtype(dtype).eps(1e-12));
  param.mutable_grad() = at::randn({8, 24}) * size;
  optimizer.step();
  const auto values = at::linalg_svdvals(param.detach());
  CHECK(values.min().item<double>() > 0.5);
  CHECK(values.max().item<double>() < 1.4);
}

TEST_CASE("Muon: groups, schedulers and rates on the device", "[optim]") {
  auto params = matrices();
  auto copies = copy_of(params);
  Muon optimizer(two_groups(params, MuonOptions(0.5).momentum(0.5)), MuonOptions(0.5));
  Muon fixed(two_groups(copies, MuonOptions(0.125).momentum(0.5)), MuonOptions(0.125));
  static_cast<MuonOptions&>(fixed.param_groups()[1].options()).lr(0.125);
  optimizer.set_learning_rates({at::full({}, 0.125), at::full({}, 0.125, at::kDouble)});
  set_gradients({&params, &copies});
  optimizer.step();
  fixed.step();
  CHECK(equal(params, copies));
}

TEST_CASE("Muon: what does not fit is refused, and nothing changes", "[optim]") {
  const auto vector = at::zeros({3}, at::requires_grad());
  const auto matrix = at::ones({2, 3}, at::requires_grad());
  CHECK_THROWS_AS(Muon(Params{vector}), c10::ValueError);
  CHECK_THROWS_AS(Muon(Params{at::zeros({2, 2}, at::kDouble)}), c10::TypeError);
  CHECK_THROWS_AS(Muon(Params{at::zeros({2, 2}, at::kComplexFloat)}), c10::TypeError);
  CHECK_THROWS_AS(Muon(Params{matrix}, MuonOptions(-1.0)), c10::Error);
  CHECK_THROWS_AS(Muon(Params{matrix}, MuonOptions().ns_steps(100)), c10::Error);
  CHECK_THROWS_AS(Muon(Params{matrix}, MuonOptions().ns_dtype(at::kDouble)), c10::Error);
  Muon optimizer(Params{matrix});
  CHECK(message_of([&] {
          optimizer.add_param_group(torch::optim::OptimizerParamGroup(Params{vector}));
        }) ==
        "Muon::add_param_group: expected parameters of two dimensions, got shape [3]; other "
        "optimizers step those");
  CHECK(optimizer.param_groups().size() == 1);
  matrix.mutable_grad() = at::ones({2, 3}).to_sparse();
  CHECK_THROWS_AS(optimizer.step(), c10::TypeError);
  CHECK(matrix.equal(at::ones({2, 3})));
}

TEST_CASE("Muon: a checkpoint of another layout is refused", "[optim]") {
  auto params = Params{at::ones({2, 3}, at::requires_grad())};
  auto other = Params{at::ones({3, 2}, at::requires_grad())};
  Muon optimizer(params, MuonOptions(0.25));
  Muon turned(other);
  set_gradients({&params});
  params[0].mutable_grad() = at::ones({2, 3});
  optimizer.step();
  CHECK_THROWS_AS(transfer(optimizer, turned), c10::ValueError);
  CHECK(turned.state().empty());
  CHECK(static_cast<const MuonOptions&>(turned.param_groups()[0].options()).lr() == 1e-3);
  const fastamp::optim::SGD sgd(params, fastamp::optim::SGDOptions(0.5));
  CHECK(message_of([&] { transfer(sgd, optimizer); }).find("Muon::load: expected an archive") == 0);
  CHECK(static_cast<const MuonOptions&>(optimizer.param_groups()[0].options()).lr() == 0.25);
}
