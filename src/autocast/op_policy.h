// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <fastamp/autocast/policy.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

// The policy of each op that is in force: the process's, and those that blocks put over it on one
// thread. policy.cpp edits them.
namespace fastamp::autocast {

/// The process's policies, one byte per op and device, read by every autocast op call.
using PolicyTable = std::array<std::array<std::atomic<OpPolicy>, kNumSlots>, kNumPolicyDevices>;

extern PolicyTable g_policies;

/// Policy without regard to overrides. Relaxed: an edit needs to be seen soon, not in order with
/// anything else.
inline OpPolicy process_policy_of(OpId op, PolicyDevice device) {
  return g_policies[static_cast<std::size_t>(device)][static_cast<std::size_t>(op)].load(
      std::memory_order_relaxed);
}

/// Policies that replace the process's on one thread for a while.
struct PolicyOverrides {
  static constexpr std::uint8_t kNone = 0xFF;
  std::array<std::array<std::uint8_t, kNumSlots>, kNumPolicyDevices> policies;

  PolicyOverrides() {
    for (auto& of_device : policies) {
      of_device.fill(kNone);
    }
  }
};

using SharedOverrides = std::shared_ptr<const PolicyOverrides>;

/// Threads that have overrides now: while it is 0, thread-local memory is not read.
extern std::atomic<int> g_overriding_threads;

/// Returns this thread's override of an op's policy, if it has one.
std::optional<OpPolicy> overridden_policy(OpId op, PolicyDevice device);

/// The policy in force on this thread. While no thread has overrides, it costs one load more than
/// process_policy_of().
inline OpPolicy policy_of(OpId op, PolicyDevice device) {
  if (g_overriding_threads.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    if (const auto policy = overridden_policy(op, device)) {
      return *policy;
    }
  }
  return process_policy_of(op, device);
}

void set_policy(OpId op, PolicyDevice device, OpPolicy policy);

/// Sets every policy to its default.
void load_default_policies();

/// The policy an op starts with: what it was registered with, or the table's line where torch
/// autocasts the op on that device, else pass.
OpPolicy default_policy(OpId op, PolicyDevice device);

}  // namespace fastamp::autocast
