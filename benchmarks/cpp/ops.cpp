// SPDX-License-Identifier: Apache-2.0
// Ops in an open region, without Python: torch's autocast kernels and fastamp's.
#include "main.h"
#include "torch_region.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/registration.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <string>

namespace {

constexpr std::int64_t kWidth = 256;

struct Product {
  at::ScalarType x;
  at::ScalarType w;
  bool is_weight;
};

template <class Region, class... Arguments>
void multiply(benchmark::State& state, const Product& product, Arguments... arguments) {
  const at::Tensor x = at::randn({8, 8}, product.x);
  const at::Tensor w = at::randn({8, 8}, product.w).set_requires_grad(product.is_weight);
  const Region region(arguments...);
  for (auto _ : state) {
    benchmark::DoNotOptimize(at::mm(x, w));
  }
}

void with_torch(benchmark::State& state, const Product& product) {
  fastamp::unregister_kernels();
  multiply<TorchRegion>(state, product, at::kBFloat16);
  fastamp::register_kernels();
}

void with_fastamp(benchmark::State& state, const Product& product) {
  multiply<fastamp::AutocastGuard>(state, product, at::kCPU, at::kBFloat16);
}

/// LibTorch's layer, which multiplies with `weight.t()`.
template <class Region, class... Arguments>
void apply_linear(benchmark::State& state, Arguments... arguments) {
  torch::nn::Linear linear(kWidth, kWidth);
  const at::Tensor x = at::randn({8, kWidth});
  const Region region(arguments...);
  for (auto _ : state) {
    benchmark::DoNotOptimize(linear->forward(x));
  }
}

void linear_with_torch(benchmark::State& state) {
  fastamp::unregister_kernels();
  apply_linear<TorchRegion>(state, at::kBFloat16);
  fastamp::register_kernels();
}

void linear_with_fastamp(benchmark::State& state) {
  apply_linear<fastamp::AutocastGuard>(state, at::kCPU, at::kBFloat16);
}

void add(const std::string& row, const Product& product) {
  benchmark::RegisterBenchmark((row + "|torch.amp").c_str(), with_torch, product);
  benchmark::RegisterBenchmark((row + "|fastamp").c_str(), with_fastamp, product);
}

}  // namespace

void register_benchmarks() {
  add("C++: mm 8x8, bf16 (no cast)", {at::kBFloat16, at::kBFloat16, false});
  add("C++: mm 8x8, bf16 x cached weight", {at::kBFloat16, at::kFloat, true});
  add("C++: mm 8x8, fp32 x cached weight", {at::kFloat, at::kFloat, true});
  add("C++: mm 8x8, fp32 x frozen fp32", {at::kFloat, at::kFloat, false});
  const std::string linear = "C++: torch::nn::Linear 256x256, fp32";
  benchmark::RegisterBenchmark((linear + "|torch.amp").c_str(), linear_with_torch);
  benchmark::RegisterBenchmark((linear + "|fastamp").c_str(), linear_with_fastamp);
}
