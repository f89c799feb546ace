// SPDX-License-Identifier: Apache-2.0
// What a fused step on CUDA costs the host: checks, table, launch. The kernel's source is compiled
// as C++ against the headers of tests/cpp/cuda_on_cpu, and a launch copies its arguments and drops
// them: all but the driver is as it would be, without a GPU. The tensors are those of a CPU.
#include "kernels/fused_steps.h"
#include "ops/checks.h"

#include <ATen/ops/zeros.h>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kElements = 16;

/// Lists of an AdamW step. Their tensors were made in another order than they stand in, as those of
/// a model that has been trained for a while: neighbours in a list are no neighbours in memory.
struct Lists {
  explicit Lists(std::size_t count) {
    std::vector<at::Tensor> made(5 * count);
    for (auto& tensor : made) {
      tensor = at::zeros({kElements});
    }
    // NOLINTNEXTLINE(bugprone-random-generator-seed): the same order in every run
    std::ranges::shuffle(made, std::mt19937(7));
    for (std::size_t i = 0; i < count; ++i) {
      params.push_back(made[5 * i]);
      grads.push_back(made[5 * i + 1]);
      first.push_back(made[5 * i + 2]);
      second.push_back(made[5 * i + 3]);
      steps.push_back(made[5 * i + 4].narrow(0, 0, 1).squeeze(0));
    }
    sizes = {static_cast<int64_t>(count)};
  }

  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> first;
  std::vector<at::Tensor> second;
  std::vector<at::Tensor> steps;
  std::vector<int64_t> sizes;
};

void step(benchmark::State& state, std::size_t count) {
  const Lists lists(count);
  const std::vector<double> rate{1e-3};
  const std::vector<double> beta{0.9};
  const std::vector<double> zero{0.0};
  const c10::List<bool> no({false});
  const std::optional<at::Tensor> none;
  const fastamp::ops::FusedAdamwArgs args{
      lists.params, lists.grads, lists.first, lists.second, {},   lists.steps, {}, lists.sizes,
      rate,         beta,        beta,        zero,         zero, no,          no, no,
      {},           {},          {},          none,         none, none,        {}, false};
  const auto launch = [&] {
    fastamp::kernels::fused_adamw_cuda(args, fastamp::ops::check_fused_adamw(args));
  };
  launch();  // The first one makes memory that later ones use again.
  for (auto _ : state) {
    launch();
  }
}

void register_benchmarks() {
  for (const std::size_t count : {150UL, 1000UL, 10'000UL}) {
    const auto row =
        "C++: host's part of a CUDA step, AdamW, " + std::to_string(count) + " tensors";
    benchmark::RegisterBenchmark((row + "|fastamp").c_str(), step, count);
  }
}

}  // namespace

int main(int argc, char** argv) {
  register_benchmarks();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
