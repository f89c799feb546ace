// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::muon_momentum_ and muon_apply_ leave the CPU kernels' bits in all they write.

#include "cuda_on_cpu/step_case.h"
#include "kernels/functors/noise.h"
#include "kernels/muon.h"
#include "support/catch.h"

#include <array>

using namespace fastamp::test;
namespace kernels = fastamp::kernels;

namespace {

/// What the first pass reads and writes.
struct Matrices {
  std::vector<at::Tensor> grads, buffers, updates, steps;
  std::vector<std::int64_t> group_sizes, noise_origins;

  Matrices copy() const {
    return {copies_of(grads), copies_of(buffers), copies_of(updates),
            copies_of(steps), group_sizes,        noise_origins};
  }
  bool same_as(const Matrices& other) const {
    return same_bits(grads, other.grads) && same_bits(buffers, other.buffers) &&
           same_bits(updates, other.updates) && same_bits(steps, other.steps);
  }
};

/// Every edge size, each with another mixture of dtypes and distance from a boundary.
Matrices make_matrices(const StepCase& c) {
  constexpr std::array<at::ScalarType, 3> kTypes = {at::kFloat, at::kHalf, at::kBFloat16};
  Values values(static_cast<unsigned>(c.skew) + 5);
  Matrices made;
  const std::size_t count = c.groups > 4 ? 2 * c.groups : edge_sizes().size();
  for (std::size_t n = 0; n < count; ++n) {
    const auto numel = edge_sizes()[(n * 7 + c.skew) % edge_sizes().size()];
    const auto off = [&](std::size_t salt) { return c.skew == 0 ? 0 : (n * c.skew + salt) % 5; };
    const auto moment = (n / 3) % 2 == 0 ? at::kFloat : at::kBFloat16;
    made.grads.push_back(values.tensor(numel, kTypes[n % 3], off(3), 10.0F));
    made.buffers.push_back(values.tensor(numel, moment, off(1)));
    made.updates.push_back(values.tensor(numel, kTypes[(n / 2) % 3], off(2)));
    const bool noisy = c.noisy && n % 5 != 4;
    made.noise_origins.push_back(noisy ? kernels::noise_origin(n, n * 1000003) : -1);
    if (noisy) {
      made.steps.push_back(guarded(1, at::kFloat));
      set_element(made.steps.back(), 0, n % 7 == 5 ? 16777216.0F : static_cast<float>(n));
    }
  }
  for (std::size_t g = 0; g < c.groups; ++g) {
    made.group_sizes.push_back(
        static_cast<std::int64_t>(count * (g + 1) / c.groups - count * g / c.groups));
  }
  return made;
}

void run_momentum(const Matrices& of, const StepCase& c, bool emulated) {
  std::vector<double> momentum;
  c10::List<bool> nesterov;
  for (std::size_t g = 0; g < c.groups; ++g) {
    momentum.push_back(g % 3 == 0 ? 0.95 : 0.3);  // from either end, and with noise
    nesterov.push_back(g % 2 == 0);
  }
  const AmpStepArgs amp_step(c);
  const auto lies = [&](std::vector<at::Tensor> all) {
    for (auto& t : all) {
      t = c.turned ? turned(t) : t;
    }
    return all;
  };
  const auto grads = lies(of.grads);
  const auto buffers = lies(of.buffers);
  const auto updates = lies(of.updates);
  const fastamp::ops::MuonMomentumArgs args{grads,
                                            buffers,
                                            updates,
                                            of.group_sizes,
                                            momentum,
                                            nesterov,
                                            amp_step.inv_scale,
                                            amp_step.clip_coef,
                                            amp_step.found_inf,
                                            amp_step.clip_value,
                                            c.writes,
                                            of.noise_origins,
                                            of.steps};
  kernels::StepEntries entries;
  std::size_t index = 0;
  std::size_t counted = 0;
  for (std::size_t g = 0; g < c.groups; ++g) {
    for (std::int64_t n = 0; n < of.group_sizes[g]; ++n, ++index) {
      const bool noisy = of.noise_origins[index] >= 0;
      entries.add(kernels::momentum_entry(args, index, g, noisy ? &of.steps[counted++] : nullptr));
    }
  }
  emulated ? kernels::muon_momentum_cuda(args, std::move(entries))
           : kernels::muon_momentum_cpu(args, std::move(entries));
}

void run_apply(const StepLists& lists, const StepCase& c, bool emulated) {
  std::vector<double> lr, ratio, decay;
  for (std::size_t g = 0; g < c.groups; ++g) {
    lr.push_back(0.01 * static_cast<double>(g + 1));
    ratio.push_back(g % 2 == 0 ? 1.0 : 1.7);
    decay.push_back(g % 3 == 1 ? 0.0 : 0.1);
  }
  const AmpStepArgs amp_step(c);
  const fastamp::ops::MuonApplyArgs args{
      lists.params, lists.grads,  lists.masters, lists.group_sizes, lr, ratio, decay,
      {},           lists.copies, lists.copy_of, amp_step.found_inf};
  auto all = lists.entries(false, c);
  for (auto& entry : all) {  // No momentum, no counters.
    entry.tensors[kernels::kFirst] = nullptr;
    entry.tensors[kernels::kStep] = nullptr;
  }
  const kernels::StepEntries entries(all);
  emulated ? kernels::muon_apply_cuda(args, entries) : kernels::muon_apply_cpu(args, entries);
}

bool all_zero(const std::vector<at::Tensor>& tensors) {
  for (const auto& t : tensors) {
    for (std::int64_t i = 0; i < t.numel(); ++i) {
      if (element_of(t, i) != 0.0F) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

TEST_CASE("emulated Muon: momentum over every mixture of dtypes, sizes and AmpSteps", "[muon]") {
  for_each_shape([] {
    for (const auto& c : StepCase::all()) {
      const auto before = make_matrices(c);
      const auto on_cuda = before.copy();
      const auto on_cpu = before.copy();
      run_momentum(on_cuda, c, true);
      run_momentum(on_cpu, c, false);
      CHECK(on_cuda.same_as(on_cpu));
      CHECK(same_bits(on_cuda.buffers, before.buffers) == c.skips);
      CHECK(all_zero(on_cuda.updates) == c.skips);
    }
  });
}

TEST_CASE("emulated Muon: buffers rounded by noise have the CPU's bits", "[muon]") {
  for_each_shape([] {
    for (auto c : StepCase::all()) {
      c.noisy = true;
      for (const bool turned : {false, true}) {
        c.turned = turned;
        const auto before = make_matrices(c);
        const auto on_cuda = before.copy();
        const auto on_cpu = before.copy();
        run_momentum(on_cuda, c, true);
        run_momentum(on_cpu, c, false);
        CHECK(on_cuda.same_as(on_cpu));
        CHECK(same_bits(on_cuda.steps, before.steps) == c.skips);
      }
    }
  });
  // Else the noise is not what is tested.
  StepCase c{};
  const auto nearest = make_matrices(c);
  run_momentum(nearest, c, true);
  c.noisy = true;
  const auto noisy = make_matrices(c);
  run_momentum(noisy, c, true);
  CHECK(same_bits(nearest.updates, noisy.updates));
  CHECK_FALSE(same_bits(nearest.buffers, noisy.buffers));
}

TEST_CASE("emulated Muon: updates of all dtypes reach weights, masters, remainders and copies",
          "[muon]") {
  for_each_shape([] {
    for (auto c : StepCase::all()) {
      for (const bool remainders : {false, true}) {
        c.remainders = remainders;
        c.writes = false;
        const auto before = make_step_lists(c, false);
        const auto on_cuda = before.copy();
        const auto on_cpu = before.copy();
        run_apply(on_cuda, c, true);
        run_apply(on_cpu, c, false);
        CHECK(on_cuda.same_as(on_cpu));
        CHECK(same_bits(on_cuda.grads, before.grads));
        CHECK(same_bits(on_cuda.params, before.params) == c.skips);
      }
    }
  });
}
