// SPDX-License-Identifier: Apache-2.0
#pragma once

// The launch of a fused step: one per kLaunchGroups groups.

#include "kernels/cuda/step_kernel.cuh"
#include "kernels/cuda/zeroed_workspace.h"

#include <algorithm>

namespace fastamp::kernels::cuda {

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
void launch_step(const std::vector<Group>& groups, const DenseStep& step,
                 const GatePointers& args) {
  constexpr std::size_t kDepth = kFirst + Op::kMoments;
  const ZeroedWorkspace arrivals(sizeof(unsigned), at::cuda::getCurrentCUDAStream());
  for (std::size_t first = 0; first < groups.size(); first += kLaunchGroups) {
    StepKernel<Op> kernel{{}, args, static_cast<unsigned*>(arrivals.get())};
    const auto count = std::min(kLaunchGroups, groups.size() - first);
    std::copy_n(groups.begin() + static_cast<std::ptrdiff_t>(first), count, kernel.op.groups);
    const auto entries = entries_of_groups<kDepth>(step.entries, first);
    if (!entries.empty()) {
      multi_tensor_apply(entries, kernel);
    }
  }
}

}  // namespace fastamp::kernels::cuda
