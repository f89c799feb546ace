// SPDX-License-Identifier: Apache-2.0
#include "autocast/registered_ops.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <vector>

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
