// SPDX-License-Identifier: Apache-2.0
#include "helpers.h"
#include "support/catch.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <random>
#include <vector>

using fastamp::test::cpu_options;
using fastamp::test::sgd;
using fastamp::test::started;

namespace {

// The scaler's algorithm written out over torch's own two operators.
struct Reference {
  at::Tensor scale;
  at::Tensor growth_tracker = at::zeros({}, at::kInt);

  bool step(std::vector<at::Tensor>& weights, std::vector<at::Tensor> gradients, double lr,
            double growth, double backoff, int64_t interval) {
    const auto inverse = scale.to(at::kDouble).reciprocal().to(at::kFloat);
    auto found_inf = at::zeros({});
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse);
    const bool finite = found_inf.item<float>() == 0.0F;
    for (std::size_t i = 0; finite && i < weights.size(); ++i) {
      weights[i].add_(gradients[i], -lr);
    }
    at::_amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval);
    return finite;
  }
};

}  // namespace

TEST_CASE("trajectory: random histories equal torch's operators bit for bit", "[scaler]") {
  std::mt19937 random(GENERATE(range(0U, 20U)));
  const double growth = random() % 2 == 0 ? 2.0 : 1.3;
  const double backoff = random() % 2 == 0 ? 0.5 : 0.7;
  const auto interval = static_cast<int64_t>(random() % 4) + 1;
  auto scaler = started(cpu_options()
                            .init_scale(1000.0)
                            .growth_factor(growth)
                            .backoff_factor(backoff)
                            .growth_interval(interval));
  Reference reference{at::full({}, 1000.0)};
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> weights;
  for (const int64_t size : {1, 5, 33, 300}) {
    weights.push_back(at::randn({size}));
    parameters.push_back(weights.back().clone().requires_grad_(true));
  }
  auto optimizer = sgd(parameters, 0.5);
  for (int step = 0; step < 100; ++step) {
    std::vector<at::Tensor> gradients;
    for (auto& parameter : parameters) {
      auto gradient = at::randn(parameter.sizes()).mul_(100.0);
      if (random() % 20 == 0) {
        gradient[0] = random() % 2 == 0 ? std::numeric_limits<float>::infinity()
                                        : std::numeric_limits<float>::quiet_NaN();
      }
      parameter.mutable_grad() = gradient.clone();
      gradients.push_back(gradient);
    }
    const bool stepped = scaler.step(optimizer).has_value();
    scaler.update();
    REQUIRE(stepped == reference.step(weights, gradients, 0.5, growth, backoff, interval));
    REQUIRE(scaler.get_scale() == reference.scale.item<double>());
    REQUIRE(scaler.state()->growth_tracker == reference.growth_tracker.item<int64_t>());
    for (std::size_t i = 0; i < weights.size(); ++i) {
      REQUIRE(parameters[i].detach().equal(weights[i]));
    }
  }
}
