// SPDX-License-Identifier: Apache-2.0
// Unscaling gradients and updating the scale, without Python: fastamp::GradScaler, and torch's own
// ops called by hand as torch.amp.GradScaler calls them.
#include "gradients.h"
#include "main.h"
#include "torch_scaler.h"

#include <torch/optim/sgd.h>

#include <string>

namespace {

torch::optim::SGD make_optimizer(int64_t count) {
  return torch::optim::SGD(make_parameters(count), torch::optim::SGDOptions(1e-6));
}

template <class Scaler>
void unscale_and_update(benchmark::State& state, Scaler scaler, int64_t count) {
  auto optimizer = make_optimizer(count);
  for (auto _ : state) {
    scaler.unscale_(optimizer);
    scaler.update();
  }
}

void by_hand(benchmark::State& state, int64_t count) {
  unscale_and_update(state, TorchScaler(kScale), count);
}

void with_scaler(benchmark::State& state, int64_t count) {
  unscale_and_update(state, make_scaler(), count);
}

}  // namespace

void register_benchmarks() {
  for (const int64_t count : {1, 10, 100, 1000, 10'000, 100'000}) {
    const auto row = "C++: unscale_ + update, " + std::to_string(count) + " x 16";
    benchmark::RegisterBenchmark((row + "|torch.amp").c_str(), by_hand, count);
    benchmark::RegisterBenchmark((row + "|fastamp").c_str(), with_scaler, count);
  }
}
