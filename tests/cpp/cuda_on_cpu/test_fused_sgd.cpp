// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::fused_sgd_ leaves the CPU kernel's bits in all that it writes.

#include "cuda_on_cpu/step_case.h"
#include "support/catch.h"

using namespace fastamp::test;
namespace kernels = fastamp::kernels;

namespace {

void run_sgd(const StepLists& lists, const std::vector<kernels::StepEntry>& entries,
             const StepCase& c, bool emulated) {
  std::vector<double> lr, momentum, decay;
  const std::vector<double> dampening(c.groups, 0.1);
  c10::List<bool> nesterov, maximize;
  for (std::size_t g = 0; g < c.groups; ++g) {
    lr.push_back(0.01 * static_cast<double>(g + 1));
    momentum.push_back(has_momentum(false, g) ? (g % 2 == 0 ? 0.999 : 0.9) : 0.0);
    decay.push_back(g % 2 == 0 ? 0.01 : 0.0);
    nesterov.push_back(g % 2 == 0);
    maximize.push_back(g % 5 == 3);
  }
  const AmpStepArgs amp_step(c);
  const fastamp::ops::FusedSgdArgs args{lists.params,
                                        lists.grads,
                                        lists.first,
                                        lists.steps,
                                        lists.masters,
                                        lists.group_sizes,
                                        lr,
                                        momentum,
                                        dampening,
                                        decay,
                                        nesterov,
                                        maximize,
                                        {},
                                        lists.copies,
                                        lists.copy_of,
                                        amp_step.inv_scale,
                                        amp_step.clip_coef,
                                        amp_step.found_inf,
                                        amp_step.clip_value,
                                        c.writes,
                                        lists.noise_origins(c)};
  const kernels::StepEntries all(entries);
  emulated ? kernels::fused_sgd_cuda(args, all) : kernels::fused_sgd_cpu(args, all);
}

void run_both(const StepLists& on_cuda, const StepCase& c) {
  const auto on_cpu = on_cuda.copy();
  run_sgd(on_cuda, on_cuda.entries(false, c), c, true);
  run_sgd(on_cpu, on_cpu.entries(false, c), c, false);
  CHECK(on_cuda.same_as(on_cpu));
}

}  // namespace

TEST_CASE("emulated SGD: every mixture of dtypes, sizes, masters and copies", "[fused_sgd]") {
  for_each_shape([] {
    for (auto c : StepCase::all()) {
      for (const bool remainders : {false, true}) {
        c.remainders = remainders;
        run_both(make_step_lists(c, false), c);
      }
    }
  });
}

TEST_CASE("emulated SGD: weights that are not finite, and what their copies say of it",
          "[fused_sgd]") {
  for_each_shape([] {
    for (const auto& c : StepCase::all()) {
      const auto lists = make_step_lists(c, false);
      lists.spoil();
      run_both(lists, c);
    }
  });
}

TEST_CASE("emulated SGD: buffers rounded by noise have the CPU's bits", "[fused_sgd]") {
  for_each_shape([] {
    for (auto c : StepCase::all()) {
      c.noisy = true;
      c.bf16_moments = true;
      c.remainders = c.writes;
      for (const bool turned : {false, true}) {
        c.turned = turned;
        run_both(make_step_lists(c, false), c);
      }
    }
  });
  // Else the noise is not what is tested.
  StepCase c{.bf16_moments = true};
  const auto nearest = make_step_lists(c, false);
  const auto noisy = nearest.copy();
  run_sgd(nearest, nearest.entries(false, c), c, true);
  c.noisy = true;
  run_sgd(noisy, noisy.entries(false, c), c, true);
  CHECK(same_bits(nearest.params, noisy.params));
  CHECK(same_bits(nearest.steps, noisy.steps));
  CHECK_FALSE(same_bits(nearest.first, noisy.first));
}

TEST_CASE("emulated SGD: steps whose lists need each home of the table", "[fused_sgd]") {
  const auto count = GENERATE(std::size_t{50}, std::size_t{400}, std::size_t{1200});
  if (brief() && count != 400) {
    return;
  }
  emulator::device() = {1, 512};
  const StepCase c{.scales = true};
  Values values(8);
  StepLists lists;
  for (std::size_t i = 0; i < count; ++i) {
    const auto numel = static_cast<std::int64_t>(i % 7);
    lists.params.push_back(values.tensor(numel, at::kFloat, i % 2));
    lists.grads.push_back(values.tensor(numel, i % 2 == 0 ? at::kFloat : at::kHalf));
    lists.first.push_back(values.tensor(numel, at::kFloat));
    const auto steps = guarded(1, at::kFloat);
    set_element(steps, 0, static_cast<float>(i % 2));
    lists.steps.push_back(steps);
  }
  lists.group_sizes = {static_cast<std::int64_t>(count)};
  const auto on_cpu = lists.copy();
  const auto entries = [](const StepLists& of) {
    std::vector<kernels::StepEntry> all(of.params.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].tensors = {&of.grads[i], &of.params[i], nullptr, &of.steps[i], &of.first[i]};
    }
    return all;
  };
  run_sgd(lists, entries(lists), c, true);
  run_sgd(on_cpu, entries(on_cpu), c, false);
  CHECK(lists.same_as(on_cpu));
}
