// SPDX-License-Identifier: Apache-2.0
#include "autocast/boxed_kernel.h"
#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/op_table.h"
#include "autocast/registration.h"
#include "core/thread_bound.h"

#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fastamp {
namespace {

using autocast::OpId;
using autocast::PolicyDevice;

c10::OperatorName parse(const std::string& name) {
  const auto dot = name.find('.');
  return dot == std::string::npos ? c10::OperatorName(name, "")
                                  : c10::OperatorName(name.substr(0, dot), name.substr(dot + 1));
}

/// The op of this name, or all its overloads if the name has none.
std::vector<c10::OperatorName> find_schemas(const std::string& name) {
  const auto wanted = parse(name);
  std::vector<c10::OperatorName> found;
  std::vector<std::string> known;
  const std::string prefix = name.substr(0, name.find("::"));
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool named = op.name == wanted.name;
    if (named && (op.overload_name == wanted.overload_name || wanted.overload_name.empty()) &&
        c10::Dispatcher::singleton().findSchema(op).has_value()) {
      found.push_back(op);
    }
    if (op.name.starts_with(prefix + "::")) {
      known.push_back(op.name);
    }
  }
  std::ranges::sort(known);
  const auto repeated = std::ranges::unique(known);
  known.erase(repeated.begin(), repeated.end());
  TORCH_CHECK_VALUE(!found.empty(),
                    "register_op: expected name to be that of an op that torch knows, such as "
                    "'mylib::op', got '",
                    name, "'.",
                    known.empty() ? " No op has this namespace; define the op first."
                                  : " Nearest: " + autocast::nearest_names(name, known) + ".");
  return found;
}

std::string joined(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void check_not_in_table(const std::string& name) {
  for (const auto& entry : autocast::kernel_entries()) {
    TORCH_CHECK_VALUE(entry.qualified_name() != name,
                      "register_op: expected an op that is not in the table, got '", name,
                      "'. policies.set (C++ set_op_policy) changes its policy.");
  }
}

std::vector<autocast::RegisteredOp> candidates(const std::string& name) {
  std::vector<autocast::RegisteredOp> ops;
  for (const auto& found : find_schemas(name)) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(found.name.c_str(),
                                                                   found.overload_name.c_str());
    ops.push_back({joined(found),
                   autocast::boxed_capabilities(op.schema()),
                   {OpPolicy::kPass, OpPolicy::kPass},
                   false});
    check_not_in_table(ops.back().name);
  }
  return ops;
}

void activate(OpId id, OpPolicy policy, const std::vector<PolicyDevice>& devices) {
  autocast::activate_registered_op(id, policy, devices);
  for (const PolicyDevice device : devices) {
    autocast::set_policy(id, device, policy);
    autocast::ensure_registered(id, device);
  }
}

void deactivate(OpId id) {
  for (const PolicyDevice device : {PolicyDevice::kCpu, PolicyDevice::kCuda}) {
    autocast::drop_registration(id, device);
    autocast::set_policy(id, device, OpPolicy::kPass);
  }
  autocast::deactivate_registered_op(id);
}

/// Takes the kernels of ops without a policy back where none is for them, as they cost each call
/// some time; threads with policies of their own may need them. Else brings them up to date.
void update_unify() {
  bool is_used = false;
  for (const auto device : {PolicyDevice::kCpu, PolicyDevice::kCuda}) {
    if (autocast::process_policy_of(autocast::kEveryOp, device) == OpPolicy::kUnify) {
      is_used = true;
    } else if (autocast::g_overriding_threads.load(std::memory_order_relaxed) == 0) {
      autocast::drop_registration(autocast::kEveryOp, device);
    }
  }
  if (is_used) {
    autocast::reach_new_ops();
    autocast::g_expects_new_ops.store(true, std::memory_order_relaxed);
  }
}

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

std::vector<OpTableRow> op_table() {
  autocast::ensure_policies_loaded();
  std::vector<OpTableRow> rows;
  for (const OpId op : autocast::all_ops()) {
    rows.push_back({autocast::short_name(op), autocast::process_policy_of(op, PolicyDevice::kCpu),
                    autocast::process_policy_of(op, PolicyDevice::kCuda),
                    autocast::default_policy(op, PolicyDevice::kCpu),
                    autocast::default_policy(op, PolicyDevice::kCuda)});
  }
  return rows;
}

OpPolicy op_policy(std::string_view op, c10::DeviceType device) {
  autocast::ensure_policies_loaded();
  const auto where = autocast::find_policy_devices("op_policy", device).front();
  const auto ops = autocast::find_ops("op_policy", op);
  const OpPolicy policy = autocast::policy_of(ops.front(), where);
  for (const OpId other : ops) {
    TORCH_CHECK_VALUE(autocast::policy_of(other, where) == policy,
                      "op_policy: expected op to name one policy, got '", op,
                      "', whose overloads differ. Name one of them, such as '",
                      autocast::short_name(other), "'.");
  }
  return policy;
}

void set_op_policy(std::string_view op, OpPolicy policy, std::optional<c10::DeviceType> device) {
  autocast::ensure_policies_loaded();
  const auto devices = autocast::find_policy_devices("set_op_policy", device);
  const auto ops = autocast::find_ops("set_op_policy", op);
  for (const OpId each : ops) {
    autocast::check_can_carry("set_op_policy", each, policy);
  }
  for (const OpId each : ops) {
    for (const PolicyDevice where : devices) {
      autocast::set_policy(each, where, policy);
      if (policy != OpPolicy::kPass) {
        autocast::ensure_registered(each, where);
      }
    }
  }
  update_unify();
}

void reset_op_policies() {
  autocast::ensure_policies_loaded();
  autocast::load_default_policies();
  update_unify();
}

void register_op(const std::string& name, OpPolicy policy, std::optional<c10::DeviceType> device) {
  autocast::ensure_policies_loaded();
  const auto devices = autocast::find_policy_devices("register_op", device);
  auto ops = candidates(name);
  // As in torch's own lists, a name without overload stands for no out= variants, if any of its
  // overloads can be cast; also for a policy that casts nothing, since that may be changed later.
  const auto keep_those = [&](const auto& is_wanted) {
    if (std::ranges::any_of(ops, is_wanted)) {
      std::erase_if(ops, [&](const auto& op) { return !is_wanted(op); });
    }
  };
  keep_those([](const auto& op) { return op.capabilities.lower; });
  keep_those([&](const auto& op) { return autocast::can_carry(op.capabilities, policy); });
  autocast::check_can_carry("register_op", ops.front().name, ops.front().capabilities, policy);
  for (const auto& op : ops) {
    activate(autocast::add_registered_op(op), policy, devices);
  }
}

void unregister_op(const std::string& name) {
  // A name without overload stands for all that register_op() added under it.
  auto ops = autocast::find_ops("unregister_op", name);
  if (name.find('.') == std::string::npos) {
    ops = autocast::find_ops("unregister_op", name + ".*");
  }
  for (const auto op : ops) {
    TORCH_CHECK_VALUE(
        static_cast<std::size_t>(op) >= autocast::kNumOps,
        "unregister_op: expected an op that register_op added, got '", name,
        "', which is in the table. Give it the policy 'pass' instead: policies.set (C++ "
        "set_op_policy).");
  }
  for (const auto op : ops) {
    deactivate(op);
  }
}

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
