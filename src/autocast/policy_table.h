#pragma once

#include "autocast/op_ids.h"

#include <fastamp/autocast/policy.h>

#include <array>
#include <atomic>

namespace fastamp::autocast {

/// The policies in force, one byte per op and column, read by every autocast op call.
using PolicyTable = std::array<std::array<std::atomic<OpPolicy>, kNumOps>, kNumColumns>;

extern PolicyTable g_policies;

/// Relaxed: an edit needs to be seen soon, not in order with anything else.
inline OpPolicy policy_of(OpId op, Column column) {
  return g_policies[static_cast<std::size_t>(column)][static_cast<std::size_t>(op)].load(
      std::memory_order_relaxed);
}

void set_policy(OpId op, Column column, OpPolicy policy);

/// Sets every policy to its default.
void load_default_policies();

/// The policy an op starts with: the table's line where torch autocasts the op on that device, else
/// pass.
OpPolicy default_policy(OpId op, Column column);

}  // namespace fastamp::autocast
