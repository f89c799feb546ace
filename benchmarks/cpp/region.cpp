// SPDX-License-Identifier: Apache-2.0
// Entering and leaving a region in C++: fastamp's guard, and what programs did by hand before.
#include "main.h"
#include "torch_region.h"

#include <fastamp/autocast/guard.h>

namespace {

void by_hand(benchmark::State& state) {
  for (auto _ : state) {
    const TorchRegion region(at::kBFloat16);
    benchmark::ClobberMemory();
  }
}

void guard(benchmark::State& state) {
  for (auto _ : state) {
    const fastamp::AutocastGuard region(at::kCPU, at::kBFloat16);
    benchmark::ClobberMemory();
  }
}

}  // namespace

void register_benchmarks() {
  benchmark::RegisterBenchmark("C++: region|torch.amp", by_hand);
  benchmark::RegisterBenchmark("C++: region|fastamp", guard);
}
