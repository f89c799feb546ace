// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_ids.h"
#include "autocast/policy_device.h"

#include <fastamp/autocast/policy.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

namespace fastamp::autocast {

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

/// This thread's override of an op's policy, if it has one.
std::optional<OpPolicy> overridden_policy(OpId op, PolicyDevice device);

}  // namespace fastamp::autocast
