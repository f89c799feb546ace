// Unscaling gradients and updating the scale, without Python: fastamp::GradScaler, and torch's own
// ops called by hand as torch.amp.GradScaler calls them (LibTorch has no scaler).
#include "main.h"

#include <fastamp/scaler/grad_scaler.h>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <string>
#include <vector>

namespace {

// So near 1 that gradients, which each call divides by it again, stay normal numbers.
constexpr double kScale = 1.0001;
constexpr int64_t kElements = 16;

torch::optim::SGD make_optimizer(int64_t count) {
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < count; ++i) {
    parameters.push_back(at::zeros({kElements}).set_requires_grad(true));
    parameters.back().mutable_grad() = at::ones({kElements});
  }
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(1e-6));
}

void by_hand(benchmark::State& state, int64_t count) {
  auto optimizer = make_optimizer(count);
  at::Tensor scale = at::full({1}, kScale, at::kFloat);
  at::Tensor tracker = at::zeros({1}, at::kInt);
  for (auto _ : state) {
    std::vector<at::Tensor> gradients;
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        if (parameter.grad().defined()) {
          gradients.push_back(parameter.grad());
        }
      }
    }
    at::Tensor found_inf = at::zeros({1});
    const at::Tensor inv_scale = scale.to(at::kDouble).reciprocal().to(at::kFloat);
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale);
    at::_amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5,
                           std::numeric_limits<int32_t>::max());
  }
}

void with_scaler(benchmark::State& state, int64_t count) {
  auto optimizer = make_optimizer(count);
  fastamp::GradScaler scaler(
      fastamp::GradScalerOptions().device(at::kCPU).init_scale(kScale).growth_interval(
          std::numeric_limits<int32_t>::max()));
  scaler.scale(at::ones({}));
  for (auto _ : state) {
    scaler.unscale_(optimizer);
    scaler.update();
  }
}

}  // namespace

void register_benchmarks() {
  for (const int64_t count : {1, 10, 100, 1000, 10'000, 100'000}) {
    const auto row = "C++: unscale_ + update, " + std::to_string(count) + " x 16";
    benchmark::RegisterBenchmark((row + "|torch.amp").c_str(), by_hand, count);
    benchmark::RegisterBenchmark((row + "|fastamp").c_str(), with_scaler, count);
  }
}
