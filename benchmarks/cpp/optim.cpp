// SPDX-License-Identifier: Apache-2.0
// Unscale, clip, step and update without Python: fastamp's scaler and optimizers, and LibTorch's
// optimizers behind torch's own scaler ops.
#include "gradients.h"
#include "main.h"
#include "torch_scaler.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/sgd.h>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <string>

namespace {

constexpr double kLr = 1e-6;
constexpr double kMaxNorm = 1.0;

template <class Optimizer>
void with_torch(benchmark::State& state, int64_t count, bool clip) {
  const auto parameters = make_parameters(count);
  Optimizer optimizer(parameters, kLr);
  TorchScaler scaler(kScale);
  const auto iteration = [&] {
    scaler.unscale_(optimizer);
    if (clip) {
      torch::nn::utils::clip_grad_norm_(parameters, kMaxNorm);
    }
    scaler.step(optimizer);
    scaler.update();
  };
  iteration();  // The first step makes the states, which takes longer than a step.
  for (auto _ : state) {
    iteration();
  }
}

template <class Optimizer>
void with_fastamp(benchmark::State& state, int64_t count, bool clip) {
  Optimizer optimizer(make_parameters(count), kLr);
  auto scaler = make_scaler();
  const auto iteration = [&] {
    if (clip) {
      scaler.clip_grad_norm_(optimizer, kMaxNorm);
    }
    scaler.step(optimizer);
    scaler.update();
  };
  iteration();
  for (auto _ : state) {
    iteration();
  }
}

template <class Torch, class Fused>
void add(const std::string& name, bool clip) {
  for (const int64_t count : {10, 1000}) {
    const auto row = "C++: " + name + ", " + std::to_string(count) + " x 16";
    benchmark::RegisterBenchmark((row + "|torch.amp").c_str(), with_torch<Torch>, count, clip);
    benchmark::RegisterBenchmark((row + "|fastamp").c_str(), with_fastamp<Fused>, count, clip);
  }
}

}  // namespace

void register_benchmarks() {
  using namespace fastamp::optim;
  add<torch::optim::SGD, SGD>("step + update, SGD", /*clip=*/false);
  add<torch::optim::AdamW, AdamW>("step + update, AdamW", /*clip=*/false);
  add<torch::optim::AdamW, AdamW>("clip + step + update, AdamW", /*clip=*/true);
}
