// SPDX-License-Identifier: Apache-2.0
// Options drawn at random: our step beside LibTorch's optimizers, torch's clipping and torch.amp's
// algorithm written out over torch's operators.

#include "helpers.h"
#include "optim/helpers.h"
#include "support/catch.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/fuse.h>
#include <fastamp/optim/sgd.h>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <utility>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers

namespace {

namespace own = fastamp::optim;
namespace libtorch = torch::optim;

using Optimizer = std::unique_ptr<libtorch::Optimizer>;

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}

  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }
  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(engine_);
  }
  double log_uniform(double low, double high) {
    return std::exp(uniform(std::log(low), std::log(high)));
  }
  double or_zero(double low, double high) { return chance(0.5) ? uniform(low, high) : 0.0; }
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }

 private:
  std::mt19937 engine_;
};

template <typename Own, typename Torchs>
std::pair<Own, Torchs> sgd_options(Draw& draw) {
  const double lr = draw.log_uniform(1e-4, 0.3);
  const double momentum = draw.or_zero(0.1, 0.99);
  const bool nesterov = momentum > 0 && draw.chance(0.3);
  const double dampening = nesterov ? 0.0 : draw.or_zero(0.0, 0.9);
  const double weight_decay = draw.or_zero(1e-4, 0.3);
  const auto fill = [&](auto options) {
    return options.momentum(momentum)
        .dampening(dampening)
        .weight_decay(weight_decay)
        .nesterov(nesterov);
  };
  return {fill(Own(lr)), fill(Torchs(lr))};
}

template <typename Own, typename Torchs>
std::pair<Own, Torchs> adam_options(Draw& draw) {
  const double lr = draw.log_uniform(1e-5, 0.03);
  const auto betas = std::make_tuple(draw.or_zero(0.1, 0.95), draw.uniform(0.5, 0.9999));
  const double eps = draw.log_uniform(1e-8, 1e-2);
  const double weight_decay = draw.or_zero(1e-4, 0.3);
  const bool amsgrad = draw.chance(0.5);
  const auto fill = [&](auto options) {
    return options.betas(betas).eps(eps).weight_decay(weight_decay).amsgrad(amsgrad);
  };
  return {fill(Own(lr)), fill(Torchs(lr))};
}

/// The same optimizer of fastamp and of LibTorch's, with options of its own for each of two groups.
template <typename Own, typename Torchs, typename Options>
std::pair<Optimizer, Optimizer> make_pair(const Params& params, const Params& reference, Draw& draw,
                                          bool fuse, const Options& options_of) {
  const auto first = options_of(draw);
  const auto others = options_of(draw);
  Optimizer mine;
  if (fuse) {
    mine = std::make_unique<Torchs>(two_groups(params, first.second), others.second);
    own::fuse_(*mine);
  } else {
    mine = std::make_unique<Own>(two_groups(params, first.first), others.first);
  }
  return {std::move(mine),
          std::make_unique<Torchs>(two_groups(reference, first.second), others.second)};
}

std::pair<Optimizer, Optimizer> draw_pair(const Params& params, const Params& reference,
                                          Draw& draw) {
  const auto kind = draw.integer(0, 2);
  const bool fuse = draw.chance(0.3);
  if (kind == 0) {
    return make_pair<own::SGD, libtorch::SGD>(params, reference, draw, fuse,
                                              sgd_options<own::SGDOptions, libtorch::SGDOptions>);
  }
  if (kind == 1) {
    return make_pair<own::Adam, libtorch::Adam>(
        params, reference, draw, fuse, adam_options<own::AdamOptions, libtorch::AdamOptions>);
  }
  return make_pair<own::AdamW, libtorch::AdamW>(
      params, reference, draw, fuse, adam_options<own::AdamWOptions, libtorch::AdamWOptions>);
}

struct Clipping {
  std::optional<double> norm;
  std::optional<double> value;
  bool unscale_first = false;
};

Clipping draw_clipping(Draw& draw) {
  Clipping clipping;
  if (draw.chance(0.5)) {
    clipping.norm = draw.log_uniform(0.1, 100.0);
  }
  if (draw.chance(0.3)) {
    clipping.value = draw.log_uniform(0.1, 3.0);
  }
  clipping.unscale_first = draw.chance(0.3);
  return clipping;
}

/// torch.amp's iteration over LibTorch's parts, and hysteresis and bounds as documented.
struct Reference {
  fastamp::GradScalerOptions options;
  at::Tensor scale = at::full({}, options.init_scale());
  at::Tensor growth_tracker = at::zeros({}, at::kInt);
  std::int64_t patience = options.hysteresis();

  bool step(libtorch::Optimizer& optimizer, const Clipping& clipping) {
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> params;
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& param : group.params()) {
        params.push_back(param);
        if (param.grad().defined()) {
          gradients.push_back(param.grad());
        }
      }
    }
    const auto inverse = scale.to(at::kDouble).reciprocal().to(at::kFloat);
    auto found_inf = at::zeros({});
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse);
    const bool finite = found_inf.item<float>() == 0.0F;
    if (finite) {
      if (clipping.norm) {
        torch::nn::utils::clip_grad_norm_(params, *clipping.norm);
      }
      if (clipping.value) {
        torch::nn::utils::clip_grad_value_(params, *clipping.value);
      }
      optimizer.step();
    }
    update(found_inf);
    return finite;
  }

  void update(const at::Tensor& found_inf) {
    const bool overflow = found_inf.item<float>() != 0.0F;
    const auto before = scale.clone();
    at::_amp_update_scale_(scale, growth_tracker, found_inf, options.growth_factor(),
                           options.backoff_factor(), options.growth_interval());
    patience = overflow ? patience - 1 : options.hysteresis();
    if (overflow && patience > 0) {
      scale.copy_(before);
    }
    if (options.min_scale() || options.max_scale()) {
      scale.clamp_(options.min_scale().value_or(0.0),
                   options.max_scale().value_or(std::numeric_limits<float>::max()));
    }
  }
};

fastamp::GradScalerOptions draw_scaler(Draw& draw) {
  auto options = cpu_options()
                     .init_scale(draw.log_uniform(1.0, 1e4))
                     .growth_factor(draw.uniform(1.1, 3.0))
                     .backoff_factor(draw.uniform(0.2, 0.9))
                     .growth_interval(draw.integer(1, 5))
                     .hysteresis(draw.chance(0.3) ? draw.integer(2, 3) : 1)
                     .keep_scaled_grads(draw.chance(0.3))
                     .history_size(draw.chance(0.5) ? 8 : 0);
  if (draw.chance(0.3)) {
    options.min_scale(options.init_scale() / 2).max_scale(options.init_scale() * 4);
  }
  return options;
}

void spoil(Draw& draw, const std::vector<Params*>& lists) {
  const auto which = static_cast<std::size_t>(draw.integer(4, 5));  // Neither empty nor a scalar.
  const float bad = draw.chance(0.5) ? std::numeric_limits<float>::infinity()
                                     : std::numeric_limits<float>::quiet_NaN();
  for (auto* list : lists) {
    (*list)[which].mutable_grad() = at::zeros_like((*list)[which]);
    (*list)[which].mutable_grad()[0] = bad;
  }
}

void change_rates(Draw& draw, const std::vector<libtorch::Optimizer*>& optimizers) {
  const double factor = draw.uniform(0.3, 1.5);
  for (auto* optimizer : optimizers) {
    for (auto& group : optimizer->param_groups()) {
      group.options().set_lr(group.options().get_lr() * factor);
    }
  }
}

void step_fastamps(fastamp::GradScaler& scaler, libtorch::Optimizer& optimizer,
                   const Clipping& clipping) {
  if (clipping.unscale_first) {
    scaler.unscale_(optimizer);
  }
  if (clipping.norm) {
    scaler.clip_grad_norm_(optimizer, *clipping.norm);
  }
  if (clipping.value) {
    scaler.clip_grad_value_(optimizer, *clipping.value);
  }
  scaler.step(optimizer);
  scaler.update();
}

}  // namespace

TEST_CASE("step: random options follow LibTorch's optimizers and torch.amp's scale", "[scaler]") {
  const auto seed = GENERATE(range(0U, 150U));
  CAPTURE(seed);
  torch::manual_seed(seed);
  Draw draw(seed);
  auto params = make_params();
  auto reference = copy_of(params);
  const auto [mine, torchs] = draw_pair(params, reference, draw);
  const auto options = draw_scaler(draw);
  auto scaler = started(options);
  Reference expected{options};
  for (int step = 0; step < 20; ++step) {
    CAPTURE(step);
    set_gradients({&params, &reference}, scaler.get_scale());
    params[0].mutable_grad() = at::randn(params[0].sizes()).mul_(scaler.get_scale());
    reference[0].mutable_grad() = params[0].grad().clone();
    if (draw.chance(0.2)) {
      spoil(draw, {&params, &reference});
    }
    if (draw.chance(0.2)) {
      change_rates(draw, {mine.get(), torchs.get()});
    }
    const auto clipping = draw_clipping(draw);
    step_fastamps(scaler, *mine, clipping);
    const bool stepped = expected.step(*torchs, clipping);
    REQUIRE(scaler.step_was_skipped_for(*mine) == !stepped);
    REQUIRE(scaler.get_scale() == expected.scale.item<double>());
    REQUIRE(scaler.state()->growth_tracker == expected.growth_tracker.item<std::int64_t>());
    // As in optim/test_against_torch.cpp; clipping's factors differ in their last bit besides.
    REQUIRE(difference(params, reference) <= 16.0);
  }
}
