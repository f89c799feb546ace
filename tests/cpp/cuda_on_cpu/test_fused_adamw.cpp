// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::fused_adamw_ leaves the CPU kernel's bits in all that it writes, and with the
// order of products that it has on a GPU, those of torch's kernels there.

#include "cuda_on_cpu/adamw_reference.h"
#include "cuda_on_cpu/step_case.h"
#include "support/catch.h"

using namespace fastamp::test;
namespace kernels = fastamp::kernels;

namespace fastamp::kernels {
void fused_adamw_cuda_in_torch_order(const ops::FusedAdamwArgs& args, StepEntries entries);
}

namespace {

using Kernel = void (*)(const fastamp::ops::FusedAdamwArgs&, kernels::StepEntries);

c10::List<bool> list_of(const std::vector<bool>& values) {
  c10::List<bool> list;
  for (const bool value : values) {
    list.push_back(value);
  }
  return list;
}

void run_adamw(const StepLists& lists, const std::vector<kernels::StepEntry>& entries,
               const StepCase& c, Kernel kernel) {
  const AdamwGroups groups(c);
  const auto decoupled = list_of(groups.decoupled);
  const auto amsgrad = list_of(groups.amsgrad);
  const auto maximize = list_of(groups.maximize);
  const AmpStepArgs amp_step(c);
  kernel({lists.params,
          lists.grads,
          lists.first,
          lists.second,
          lists.greatest,
          lists.steps,
          lists.masters,
          lists.group_sizes,
          groups.lr,
          groups.beta1,
          groups.beta2,
          groups.eps,
          groups.decay,
          decoupled,
          amsgrad,
          maximize,
          {},
          lists.copies,
          lists.copy_of,
          amp_step.inv_scale,
          amp_step.clip_coef,
          amp_step.found_inf,
          amp_step.clip_value,
          c.writes,
          lists.noise_origins(c),
          lists.scales},
         kernels::StepEntries(entries));
}

void run_both(const StepLists& on_cuda, const StepCase& c) {
  const auto on_cpu = on_cuda.copy();
  run_adamw(on_cuda, on_cuda.entries(true, c), c, kernels::fused_adamw_cuda);
  run_adamw(on_cpu, on_cpu.entries(true, c), c, kernels::fused_adamw_cpu);
  CHECK(on_cuda.same_as(on_cpu));
}

}  // namespace

TEST_CASE("emulated AdamW: every mixture of dtypes, sizes, masters and copies", "[fused_adamw]") {
  for_each_shape([] {
    for (const auto& c : StepCase::all()) {
      run_both(make_step_lists(c, true), c);
    }
  });
}

TEST_CASE("emulated AdamW: weights that are not finite, and what their copies say of it",
          "[fused_adamw]") {
  for_each_shape([] {
    for (const auto& c : StepCase::all()) {
      const auto lists = make_step_lists(c, true);
      lists.spoil();
      run_both(lists, c);
    }
  });
}

TEST_CASE("emulated AdamW: moments rounded by noise have the CPU's bits", "[fused_adamw]") {
  for_each_shape([] {
    for (auto c : StepCase::all()) {
      c.noisy = true;
      run_both(make_step_lists(c, true), c);
      c.bf16_moments = true;
      c.turned = true;
      run_both(make_step_lists(c, true), c);
    }
  });
  // Else the noise is not what is tested.
  StepCase c{.bf16_moments = true};
  const auto nearest = make_step_lists(c, true);
  const auto noisy = nearest.copy();
  run_adamw(nearest, nearest.entries(true, c), c, kernels::fused_adamw_cuda);
  c.noisy = true;
  run_adamw(noisy, noisy.entries(true, c), c, kernels::fused_adamw_cuda);
  CHECK(same_bits(nearest.params, noisy.params));
  CHECK(same_bits(nearest.first, noisy.first));
  CHECK_FALSE(same_bits(nearest.second, noisy.second));
}

TEST_CASE("emulated AdamW: first moments that hardly move are rounded by noise of their own",
          "[fused_adamw]") {
  StepCase c{.groups = 2, .bf16_moments = true};
  const auto nearest = make_step_lists(c, true);
  const auto noisy = nearest.copy();
  run_both(nearest, c);
  c.noisy = true;
  run_both(noisy, c);
  CHECK_FALSE(same_bits(nearest.first, noisy.first));
  c = {.groups = 2, .codes = true};
  run_both(make_step_lists(c, true), c);
}

TEST_CASE("emulated AdamW: parameters with masters of two bytes", "[fused_adamw]") {
  for_each_shape([] {
    for (auto c : StepCase::all()) {
      c.remainders = true;
      c.noisy = c.amsgrad;
      run_both(make_step_lists(c, true), c);
    }
  });
}

TEST_CASE("emulated AdamW: moments in 8 bits have the CPU's bits", "[fused_adamw]") {
  for_each_shape([] {
    for (auto c : StepCase::all()) {
      c.codes = true;
      c.remainders = c.writes;
      run_both(make_step_lists(c, true), c);
    }
  });
  // Else the codes are not what is tested.
  const StepCase c{.codes = true};
  const auto lists = make_step_lists(c, true);
  const auto before = lists.copy();
  run_adamw(lists, lists.entries(true, c), c, kernels::fused_adamw_cuda);
  CHECK(lists.scales.size() > 4);
  CHECK_FALSE(same_bits(lists.scales, before.scales));
  CHECK_FALSE(same_bits(lists.first, before.first));
  CHECK_FALSE(same_bits(lists.second, before.second));
}

TEST_CASE("emulated AdamW: as nvcc compiles it, the bits of torch's kernels on CUDA",
          "[fused_adamw]") {
  emulator::device() = {1, 512};
  emulator::set_order(emulator::Order::kForward);
  bool differ = false;
  for (const auto& c : StepCase::all()) {
    const auto on_cuda = make_step_lists(c, true);
    const auto on_cpu = on_cuda.copy();
    const auto others = on_cuda.copy();
    run_adamw(on_cuda, on_cuda.entries(true, c), c, kernels::fused_adamw_cuda_in_torch_order);
    step_as_torch_on_cuda(on_cpu, c);
    CHECK(on_cuda.same_as(on_cpu));
    run_adamw(others, others.entries(true, c), c, kernels::fused_adamw_cpu);
    differ = differ || !on_cuda.same_as(others);
  }
  CHECK(differ);  // else the order of products is not what is tested
}

TEST_CASE("emulated AdamW: arrays of other layouts are copied and copied back", "[fused_adamw]") {
  const StepCase c{.writes = true, .scales = true};
  Values values(9);
  const auto matrix = [&](at::ScalarType dtype) {
    return values.positive(96, dtype).view({8, 12});
  };
  // The weight is dense in another order than the gradient, and a moment is every other column.
  StepLists on_cuda;
  on_cuda.params = {matrix(at::kFloat).t()};
  on_cuda.grads = {values.tensor(96, at::kHalf).view({12, 8})};
  on_cuda.first = {values.positive(192, at::kFloat).view({12, 16}).slice(1, 0, 16, 2)};
  on_cuda.second = {matrix(at::kFloat).t()};
  on_cuda.steps = {scalar(3.0F)};
  on_cuda.group_sizes = {1};
  StepLists on_cpu = on_cuda;
  for (auto* list : {&on_cpu.params, &on_cpu.grads, &on_cpu.first, &on_cpu.second, &on_cpu.steps}) {
    list->front() = list->front().clone();
  }
  const auto entries = [](const StepLists& of) {
    kernels::StepEntry entry;
    entry.tensors = {&of.grads[0], &of.params[0], nullptr,
                     &of.steps[0], &of.first[0],  &of.second[0]};
    return std::vector<kernels::StepEntry>{entry};
  };
  run_adamw(on_cuda, entries(on_cuda), c, kernels::fused_adamw_cuda);
  run_adamw(on_cpu, entries(on_cpu), c, kernels::fused_adamw_cpu);
  for (const auto list : {&StepLists::params, &StepLists::grads, &StepLists::first,
                          &StepLists::second, &StepLists::steps}) {
    CHECK(same_bits((on_cuda.*list)[0].contiguous(), (on_cpu.*list)[0].contiguous()));
  }
}

TEST_CASE("emulated AdamW: a driver that takes 4 KiB of arguments", "[fused_adamw]") {
  emulator::device() = {1, 256, 12000};
  const StepCase c{.groups = 3, .writes = true, .scales = true};
  run_both(make_step_lists(c, true), c);
}

TEST_CASE("emulated AdamW: a skipped step changes nothing but the gradients", "[fused_adamw]") {
  for_each_shape([] {
    const StepCase c{.groups = 2, .amsgrad = true, .skips = true, .writes = true, .scales = true};
    const auto lists = make_step_lists(c, true);
    const auto before = lists.copy();
    run_adamw(lists, lists.entries(true, c), c, kernels::fused_adamw_cuda);
    CHECK(same_bits(lists.params, before.params));
    CHECK(same_bits(lists.first, before.first));
    CHECK(same_bits(lists.steps, before.steps));
    CHECK(same_bits(lists.masters, before.masters));
    CHECK(same_bits(lists.copies, before.copies));
    CHECK_FALSE(same_bits(lists.grads, before.grads));
  });
}

TEST_CASE("emulated AdamW: a counter of several parameters counts each of them", "[fused_adamw]") {
  for_each_shape([] {
    const StepCase c{};
    auto on_cuda = make_step_lists(c, true);
    auto on_cpu = on_cuda.copy();
    const auto share = [](StepLists& lists) {
      for (auto& count : lists.steps) {
        count = lists.steps.front();
      }
    };
    share(on_cuda);
    share(on_cpu);
    run_adamw(on_cuda, on_cuda.entries(true, c), c, kernels::fused_adamw_cuda);
    run_adamw(on_cpu, on_cpu.entries(true, c), c, kernels::fused_adamw_cpu);
    CHECK(on_cuda.same_as(on_cpu));
    CHECK(value_of(on_cuda.steps.front()) == static_cast<float>(on_cuda.params.size()));
  });
}
