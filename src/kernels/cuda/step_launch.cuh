#pragma once

// Launches of a fused step: the pass over the parameters, then the step counters.

#include "kernels/cuda/step_kernel.cuh"

#include <algorithm>

namespace fastamp::kernels::cuda {

/// One element each: a lane per warp reads and adds.
struct AdvanceSteps {
  const float* found_inf;

  using Thread = bool;

  __device__ Thread begin() const { return found_inf != nullptr && *found_inf != 0.0F; }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void range(Thread& skip, const Table& table, const ChunkRange& range, int lane) const {
    if (lane == 0 && !skip) {
      *static_cast<float*>(table.pointer(0, range.entry)) += 1.0F;
    }
  }
};

/// The entries of groups [first, first + kLaunchGroups), numbered from 0 within the launch.
template <std::size_t kDepth>
std::vector<TensorEntry<kDepth>> entries_of_groups(const std::vector<DenseEntry>& entries,
                                                   std::size_t first) {
  std::vector<TensorEntry<kDepth>> part;
  part.reserve(entries.size());
  for (const auto& entry : entries) {
    if (entry.group < first || entry.group >= first + kLaunchGroups) {
      continue;
    }
    TensorEntry<kDepth> packed;
    std::copy_n(entry.pointers.begin(), kDepth, packed.pointers.begin());
    packed.numel = entry.numel;
    packed.tag = static_cast<std::uint16_t>(entry.tag.bits | (entry.group - first));
    part.push_back(packed);
  }
  return part;
}

/// Runs a step of Op, which holds `groups` of type Group, and advances the counters.
template <typename Op, typename Group>
void launch_step(const std::vector<Group>& groups, const DenseStep& step, const GateArgs& args) {
  constexpr std::size_t kDepth = kFirst + Op::kMoments;
  for (std::size_t first = 0; first < groups.size(); first += kLaunchGroups) {
    StepKernel<Op> kernel{{}, args};
    const auto count = std::min(kLaunchGroups, groups.size() - first);
    std::copy_n(groups.begin() + static_cast<std::ptrdiff_t>(first), count, kernel.op.groups);
    multi_tensor_apply(entries_of_groups<kDepth>(step.entries, first), kernel);
  }
  std::vector<TensorEntry<1>> counters;
  counters.reserve(step.steps.size());
  for (float* count : step.steps) {
    counters.push_back({{count}, 1, 0});
  }
  multi_tensor_apply(counters, AdvanceSteps{args.found_inf});
}

}  // namespace fastamp::kernels::cuda
