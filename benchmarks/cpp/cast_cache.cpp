// SPDX-License-Identifier: Apache-2.0
// Looking up the cast of a weight: torch's cache (behind a mutex, in a hash map) and fastamp's.
// Both hold as many weights as a 12-block transformer has, and each lookup is of another one.
#include "autocast/cast_cache.h"

#include "main.h"
#include "torch_region.h"

#include <ATen/ops/randn.h>

#include <vector>

namespace {

constexpr std::size_t kWeights = 148;

std::vector<at::Tensor> make_weights() {
  std::vector<at::Tensor> weights;
  weights.reserve(kWeights);
  for (std::size_t i = 0; i < kWeights; ++i) {
    weights.push_back(at::randn({8, 8}).set_requires_grad(true));
  }
  return weights;
}

void torch_cache(benchmark::State& state) {
  const auto weights = make_weights();
  const TorchRegion region(at::kBFloat16);
  for (const auto& weight : weights) {
    at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
  }
  std::size_t i = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(at::autocast::cached_cast(at::kBFloat16, weights[i], at::kCPU));
    i = i + 1 == kWeights ? 0 : i + 1;
  }
}

void own_cache(benchmark::State& state) {
  const auto weights = make_weights();
  fastamp::autocast::CastCache cache;
  for (const auto& weight : weights) {
    cache.keep(weight, at::kBFloat16, weight.to(at::kBFloat16), fastamp::autocast::CastUse::kByOp);
  }
  std::size_t i = 0;
  for (auto _ : state) {
    const at::Tensor cast =
        cache.find(weights[i], at::kBFloat16, fastamp::autocast::CastUse::kByOp);
    benchmark::DoNotOptimize(cast);
    if (!cast.defined()) {
      state.SkipWithError("a weight that was inserted is not found");
    }
    i = i + 1 == kWeights ? 0 : i + 1;
  }
}

}  // namespace

void register_benchmarks() {
  benchmark::RegisterBenchmark("C++: cached weight lookup|torch.amp", torch_cache);
  benchmark::RegisterBenchmark("C++: cached weight lookup|fastamp", own_cache);
}
