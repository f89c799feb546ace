// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_names.h"
#include "autocast/policy_overrides.h"
#include "autocast/registration.h"
#include "core/thread_bound.h"

#include <fastamp/autocast/op_policy_guard.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fastamp {
namespace {

using autocast::OpId;
using autocast::PolicyDevice;

struct Checked {
  std::vector<OpId> ops;
  std::vector<PolicyDevice> devices;
  OpPolicy policy;
};

Checked checked(const char* function, const OpPolicyEdit& edit) {
  Checked result{autocast::find_ops(function, edit.op),
                 autocast::find_policy_devices(function, edit.device), edit.policy};
  for (const OpId op : result.ops) {
    autocast::check_can_carry(function, op, edit.policy);
  }
  return result;
}

}  // namespace

detail::SharedOverrides detail::checked_op_policies(const char* function,
                                                    const std::vector<OpPolicyEdit>& edits) {
  autocast::ensure_policies_loaded();
  std::vector<Checked> all;
  all.reserve(edits.size());
  for (const auto& edit : edits) {
    all.push_back(checked(function, edit));
  }
  auto made = std::make_shared<autocast::PolicyOverrides>();
  for (const auto& [ops, devices, policy] : all) {
    for (const auto op : ops) {
      for (const auto device : devices) {
        made->policies[static_cast<std::size_t>(device)][static_cast<std::size_t>(op)] =
            static_cast<std::uint8_t>(policy);
        if (policy != OpPolicy::kPass) {
          autocast::ensure_registered(op, device);
        }
      }
    }
  }
  return made;
}

OpPolicyGuard::OpPolicyGuard(const std::vector<OpPolicyEdit>& edits)
    : id_(detail::push_op_policies(detail::checked_op_policies("OpPolicyGuard", edits),
                                   detail::OverrideMode::kAdd)) {}

void OpPolicyGuard::release() noexcept {
  const auto id = std::exchange(id_, 0);
  if (id != 0 && !detail::pop_op_policies(id)) {
    warn_of_other_thread("OpPolicyGuard");
  }
}

}  // namespace fastamp
