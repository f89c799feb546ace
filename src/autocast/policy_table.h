// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_ids.h"
#include "autocast/policy_device.h"
#include "autocast/policy_overrides.h"

#include <fastamp/autocast/policy.h>

#include <array>
#include <atomic>

namespace fastamp::autocast {

/// The process's policies, one byte per op and device, read by every autocast op call.
using PolicyTable = std::array<std::array<std::atomic<OpPolicy>, kNumSlots>, kNumPolicyDevices>;

extern PolicyTable g_policies;

/// Without regard to overrides. Relaxed: an edit needs to be seen soon, not in order with anything
/// else.
inline OpPolicy process_policy_of(OpId op, PolicyDevice device) {
  return g_policies[static_cast<std::size_t>(device)][static_cast<std::size_t>(op)].load(
      std::memory_order_relaxed);
}

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
