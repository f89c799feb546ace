// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_table.h"

#include <atomic>

namespace fastamp::autocast {

/// Fills the policy table before its first use.
void ensure_policies_loaded();

/// Registers the kernel of an op that has none yet, if our kernels are registered. Called when an
/// edit gives a policy to an op that torch does not autocast.
void ensure_registered(OpId op, PolicyDevice device);

/// Has ops that were defined, or given the policy pass, since kEveryOp was registered follow its
/// policy. Does nothing while it is not.
void reach_new_ops();

/// Whether the next region is to do so: programs set policies before they import their libraries.
extern std::atomic<bool> g_expects_new_ops;

inline void reach_expected_ops() {
  if (g_expects_new_ops.load(std::memory_order_relaxed) && g_expects_new_ops.exchange(false))
      [[unlikely]] {
    reach_new_ops();
  }
}

/// Undoes ensure_registered() for an op that a user registered, or for kEveryOp.
void drop_registration(OpId op, PolicyDevice device);

}  // namespace fastamp::autocast
