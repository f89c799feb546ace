// Entering and leaving a region in C++: fastamp's guard, and what programs did by hand before.
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/registration.h>

#include <ATen/autocast_mode.h>

#include <benchmark/benchmark.h>

namespace {

void fastamp_guard(benchmark::State& state) {
  for (auto _ : state) {
    const fastamp::AutocastGuard region(c10::kCPU, c10::kBFloat16);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(fastamp_guard);

// The steps of torch.autocast's __enter__ and __exit__, with no guard against exceptions.
void torch_state_by_hand(benchmark::State& state) {
  for (auto _ : state) {
    const auto device = c10::kCPU;
    const bool enabled = at::autocast::is_autocast_enabled(device);
    const auto dtype = at::autocast::get_autocast_dtype(device);
    const bool cached = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, c10::kBFloat16);
    at::autocast::increment_nesting();
    at::autocast::set_autocast_cache_enabled(true);
    benchmark::ClobberMemory();
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::set_autocast_cache_enabled(cached);
  }
}
BENCHMARK(torch_state_by_hand);

}  // namespace

int main(int argc, char** argv) {
  fastamp::install();  // a millisecond, once: else it is part of the first guard
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
