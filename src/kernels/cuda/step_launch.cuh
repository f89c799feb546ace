// SPDX-License-Identifier: Apache-2.0
#pragma once

// The launch of a fused step: one per kLaunchGroups groups.

#include "kernels/cuda/step_kernel.cuh"
#include "kernels/cuda/zeroed_workspace.h"

#include <algorithm>

namespace fastamp::kernels::cuda {

/// Number of further lists that entries of a kind have: origins of noise, and orders of elements.
constexpr std::size_t further_lists(StepKind kind) {
  switch (kind) {
    case StepKind::kTurned:
      return 2;
    case StepKind::kNoisy:
    case StepKind::kCodes:
      return 1;
    default:
      return 0;
  }
}

/// The entries of one kind in groups [first, first + kLaunchGroups), which are numbered from 0
/// within the launch.
template <std::size_t kDepth, StepKind kKind>
std::vector<TensorEntry<kDepth>> entries_of_groups(const std::vector<DenseEntry>& entries,
                                                   std::size_t first) {
  constexpr std::size_t kLists = kDepth - further_lists(kKind);
  std::vector<TensorEntry<kDepth>> part;
  part.reserve(entries.size());
  for (const auto& entry : entries) {
    if (entry.group < first || entry.group >= first + kLaunchGroups || entry.tag.kind() != kKind) {
      continue;
    }
    TensorEntry<kDepth> packed;
    std::copy_n(entry.pointers.begin(), kLists, packed.pointers.begin());
    if constexpr (kLists < kDepth) {
      packed.pointers[kLists] = reinterpret_cast<void*>(entry.noise_origin);
    }
    if constexpr (kLists + 1 < kDepth) {
      packed.pointers[kLists + 1] = reinterpret_cast<void*>(entry.order.packed());
    }
    packed.numel = entry.numel;
    packed.tag = static_cast<std::uint16_t>(entry.tag.bits | (entry.group - first));
    part.push_back(packed);
  }
  return part;
}

/// Runs a step of Op, which holds `groups` of type Group, over the entries of its kind; advances
/// their counters.
template <typename Op, typename Group>
void launch_step(const std::vector<Group>& groups, const DenseStep& step,
                 const AmpStepPointers& args) {
  if (!step.has(Op::kKind)) {
    return;
  }
  constexpr std::size_t kDepth = kFirst + Op::kMoments + further_lists(Op::kKind);
  const ZeroedWorkspace arrivals(sizeof(unsigned), at::cuda::getCurrentCUDAStream());
  for (std::size_t first = 0; first < groups.size(); first += kLaunchGroups) {
    StepKernel<Op> kernel{{}, args, static_cast<unsigned*>(arrivals.get())};
    const auto count = std::min(kLaunchGroups, groups.size() - first);
    std::copy_n(groups.begin() + static_cast<std::ptrdiff_t>(first), count, kernel.op.groups);
    const auto entries = entries_of_groups<kDepth, Op::kKind>(step.entries, first);
    if (!entries.empty()) {
      multi_tensor_apply(entries, kernel);
    }
  }
}

}  // namespace fastamp::kernels::cuda
