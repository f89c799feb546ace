// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>

namespace fastamp::autocast {
namespace {

struct List {
  std::mutex mutex;
  std::vector<RegisteredOp> ops;
};

/// Never destroyed: kernels may run until the process is gone.
List& list() {
  static auto* instance = new List;
  return *instance;
}

}  // namespace

template <>
void fill_kernel_entries<0>(std::array<KernelEntry, kNumOps>& entries);
template <>
void fill_kernel_entries<1>(std::array<KernelEntry, kNumOps>& entries);
template <>
void fill_kernel_entries<2>(std::array<KernelEntry, kNumOps>& entries);
template <>
void fill_kernel_entries<3>(std::array<KernelEntry, kNumOps>& entries);

const std::array<KernelEntry, kNumOps>& kernel_entries() {
  static const auto entries = [] {
    std::array<KernelEntry, kNumOps> table{};
    fill_kernel_entries<0>(table);
    fill_kernel_entries<1>(table);
    fill_kernel_entries<2>(table);
    fill_kernel_entries<3>(table);
    return table;
  }();
  return entries;
}

bool can_carry(const OpCapabilities& capabilities, OpPolicy policy) {
  switch (policy) {
    case OpPolicy::kPass:
    case OpPolicy::kBanned:
      return true;
    case OpPolicy::kLower:
      return capabilities.lower;
    case OpPolicy::kFp32:
    case OpPolicy::kLowerDense:
      return capabilities.lower && capabilities.fp32;
    case OpPolicy::kPromote:
      return capabilities.fp32;
    case OpPolicy::kSetOptDtype:
      return capabilities.set_opt_dtype;
    case OpPolicy::kAppendDtype:
      return capabilities.append_dtype;
    case OpPolicy::kUnify:
      return capabilities.unify;
  }
  return false;
}

std::size_t num_registered_ops() {
  const std::scoped_lock lock(list().mutex);
  return list().ops.size();
}

RegisteredOp registered_op(OpId op) {
  const std::scoped_lock lock(list().mutex);
  return list().ops.at(static_cast<std::size_t>(op) - kNumOps);
}

OpId add_registered_op(const RegisteredOp& op) {
  List& known = list();
  const std::scoped_lock lock(known.mutex);
  const auto found = std::ranges::find(known.ops, op.name, &RegisteredOp::name);
  const auto index = static_cast<std::size_t>(found - known.ops.begin());
  if (found == known.ops.end()) {
    TORCH_CHECK_VALUE(index < kMaxRegisteredOps, "register_op: expected at most ",
                      kMaxRegisteredOps, " registered ops, got one more: ", op.name);
    known.ops.push_back(op);
  } else {
    found->capabilities = op.capabilities;
  }
  return static_cast<OpId>(kNumOps + index);
}

void activate_registered_op(OpId op, OpPolicy policy, const std::vector<PolicyDevice>& devices) {
  const std::scoped_lock lock(list().mutex);
  RegisteredOp& registered = list().ops.at(static_cast<std::size_t>(op) - kNumOps);
  registered.active = true;
  for (const PolicyDevice device : devices) {
    registered.defaults[static_cast<std::size_t>(device)] = policy;
  }
}

void deactivate_registered_op(OpId op) {
  const std::scoped_lock lock(list().mutex);
  RegisteredOp& registered = list().ops.at(static_cast<std::size_t>(op) - kNumOps);
  registered.active = false;
  registered.defaults.fill(OpPolicy::kPass);
}

}  // namespace fastamp::autocast
