// SPDX-License-Identifier: Apache-2.0
#include "autocast/policy_table.h"

#include "autocast/op_table.h"
#include "autocast/registered_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace fastamp::autocast {
namespace {

using Policies = std::array<std::array<OpPolicy, kNumOps>, kNumPolicyDevices>;

/// The op table as written.
constexpr Policies written_policies() {
  // The table's words.
  constexpr auto pass = OpPolicy::kPass;
  constexpr auto lower = OpPolicy::kLower;
  constexpr auto fp32 = OpPolicy::kFp32;
  constexpr auto set_opt_dtype = OpPolicy::kSetOptDtype;
  constexpr auto append_dtype = OpPolicy::kAppendDtype;
  constexpr auto promote = OpPolicy::kPromote;
  constexpr auto banned = OpPolicy::kBanned;
  return {{
#define FASTAMP_OP(op, cpu, cuda) cpu,
#define FASTAMP_OP_APPEND(op, cpu, cuda, redispatch) cpu,
#define FASTAMP_OP_CUSTOM(op, cpu, cuda, Kernel) cpu,
      {{
#include "autocast/torch_op_table.inc"
      }},
#undef FASTAMP_OP
#undef FASTAMP_OP_APPEND
#undef FASTAMP_OP_CUSTOM
#define FASTAMP_OP(op, cpu, cuda) cuda,
#define FASTAMP_OP_APPEND(op, cpu, cuda, redispatch) cuda,
#define FASTAMP_OP_CUSTOM(op, cpu, cuda, Kernel) cuda,
      {{
#include "autocast/torch_op_table.inc"
      }},
#undef FASTAMP_OP
#undef FASTAMP_OP_APPEND
#undef FASTAMP_OP_CUSTOM
  }};
}

bool torch_autocasts(const KernelEntry& entry, PolicyDevice device) {
  const auto op = c10::Dispatcher::singleton().findSchema({entry.name, entry.overload});
  return op.has_value() && op->hasKernelForDispatchKey(autocast_key(device));
}

/// Read before the first kernel of fastamp is registered, while the dispatcher still shows torch's.
const Policies& default_policies() {
  static const Policies defaults = [] {
    Policies policies = written_policies();
    for (const auto device : {PolicyDevice::kCpu, PolicyDevice::kCuda}) {
      for (std::size_t op = 0; op < kNumOps; ++op) {
        if (!torch_autocasts(kernel_entries()[op], device)) {
          policies[static_cast<std::size_t>(device)][op] = OpPolicy::kPass;
        }
      }
    }
    return policies;
  }();
  return defaults;
}

}  // namespace

PolicyTable g_policies;

OpPolicy default_policy(OpId op, PolicyDevice device) {
  if (static_cast<std::size_t>(op) >= kNumOps) {
    return registered_op(op).defaults[static_cast<std::size_t>(device)];
  }
  return default_policies()[static_cast<std::size_t>(device)][static_cast<std::size_t>(op)];
}

void set_policy(OpId op, PolicyDevice device, OpPolicy policy) {
  g_policies[static_cast<std::size_t>(device)][static_cast<std::size_t>(op)].store(
      policy, std::memory_order_relaxed);
}

void load_default_policies() {
  for (const auto device : {PolicyDevice::kCpu, PolicyDevice::kCuda}) {
    for (std::size_t op = 0; op < kNumOps + num_registered_ops(); ++op) {
      set_policy(static_cast<OpId>(op), device, default_policy(static_cast<OpId>(op), device));
    }
  }
}

}  // namespace fastamp::autocast
