// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_names.h"

#include "autocast/op_policy.h"
#include "autocast/op_table.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

namespace fastamp {
namespace autocast {
namespace {

constexpr std::array<std::pair<OpPolicy, std::string_view>, 9> kPolicyNames{{
    {OpPolicy::kPass, "pass"},
    {OpPolicy::kLower, "lower"},
    {OpPolicy::kLowerDense, "lower_dense"},
    {OpPolicy::kFp32, "fp32"},
    {OpPolicy::kSetOptDtype, "set_opt_dtype"},
    {OpPolicy::kAppendDtype, "append_dtype"},
    {OpPolicy::kPromote, "promote"},
    {OpPolicy::kBanned, "banned"},
    {OpPolicy::kUnify, "unify"},
}};

constexpr std::string_view kAten = "aten::";
constexpr std::string_view kEveryOpName = "*";

std::string_view without_aten(std::string_view name) {
  return name.starts_with(kAten) ? name.substr(kAten.size()) : name;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, substituted}));
    }
  }
  return row.back();
}

OpCapabilities capabilities_of(OpId op) {
  const auto index = static_cast<std::size_t>(op);
  return index < kNumOps ? kernel_entries()[index].capabilities : registered_op(op).capabilities;
}

/// Whether an op has this name, whatever its overload. Makes no string: find_ops() asks all ops.
bool is_overload_of(OpId op, std::string_view name) {
  const auto matches = [name](std::string_view full) {
    const auto own = without_aten(full);
    return own.substr(0, own.find('.')) == name;
  };
  const auto index = static_cast<std::size_t>(op);
  return op != kEveryOp && (index < kNumOps ? matches(kernel_entries()[index].name)
                                            : matches(registered_op(op).name));
}

/// The names of all ops, with or without overloads.
std::vector<std::string> names_like(bool has_overload) {
  std::set<std::string> names;
  for (const OpId op : all_ops()) {
    const std::string full = short_name(op);
    names.insert(has_overload ? full : full.substr(0, full.find('.')));
  }
  return {names.begin(), names.end()};
}

const char* what_it_needs(OpPolicy policy) {
  switch (policy) {
    case OpPolicy::kSetOptDtype:
      return "an optional dtype argument";
    case OpPolicy::kAppendDtype:
      return "an overload with an output dtype";
    case OpPolicy::kPromote:
      return "tensor arguments that can be cast, one of them outside of dicts and tuples, and one "
             "of which at most the op writes";
    case OpPolicy::kUnify:
      return "an op of register_op (C++ too) with two tensor arguments, of which it writes none in "
             "lists; '*' stands for every op without a policy";
    default:
      return "tensor arguments that can be cast, one of them outside of dicts and tuples, and none "
             "of which the op writes";
  }
}

}  // namespace

std::string full_name(OpId op) {
  const auto index = static_cast<std::size_t>(op);
  if (op == kEveryOp) {
    return std::string(kEveryOpName);
  }
  return index < kNumOps ? kernel_entries()[index].qualified_name() : registered_op(op).name;
}

std::string short_name(OpId op) { return std::string(without_aten(full_name(op))); }

std::vector<OpId> all_ops() {
  std::vector<OpId> ops(kNumOps + num_registered_ops());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    ops[i] = static_cast<OpId>(i);
  }
  std::erase_if(ops, [](OpId op) {
    return static_cast<std::size_t>(op) >= kNumOps && !registered_op(op).active;
  });
  const auto acts = [](PolicyDevice device) {
    return process_policy_of(kEveryOp, device) != OpPolicy::kPass;
  };
  if (acts(PolicyDevice::kCpu) || acts(PolicyDevice::kCuda)) {
    ops.push_back(kEveryOp);
  }
  return ops;
}

std::string nearest_names(std::string_view wanted, const std::vector<std::string>& known) {
  constexpr std::size_t kShown = 3;
  std::vector<std::pair<std::size_t, std::string>> ranked;
  ranked.reserve(known.size());
  for (const auto& name : known) {
    ranked.emplace_back(edit_distance(wanted, name), name);
  }
  const auto shown = std::min(kShown, ranked.size());
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(shown),
                    ranked.end());
  std::vector<std::string> names;
  names.reserve(shown);
  for (std::size_t i = 0; i < shown; ++i) {
    names.push_back(ranked[i].second);
  }
  return c10::Join(", ", names);
}

std::vector<OpId> find_ops(const char* function, std::string_view name) {
  if (name == kEveryOpName) {
    return {kEveryOp};
  }
  const std::string_view wanted = without_aten(name);
  const auto wanted_dot = wanted.find('.');
  const std::string_view base = wanted.substr(0, wanted_dot);
  const bool has_overload = wanted_dot != std::string_view::npos;
  const std::string_view overload = has_overload ? wanted.substr(wanted_dot + 1) : "";
  std::vector<OpId> overloads;
  std::optional<OpId> by_default;
  for (const OpId op : all_ops()) {
    if (!is_overload_of(op, base)) {
      continue;
    }
    const std::string full = short_name(op);
    if (full == wanted && has_overload) {
      return {op};
    }
    overloads.push_back(op);
    by_default = full == base ? std::optional(op) : by_default;
  }
  if (by_default.has_value() && (!has_overload || overload == "default")) {
    return {*by_default};
  }
  const bool means_all = !has_overload || overload == "*";
  TORCH_CHECK_VALUE(means_all && !overloads.empty(), function,
                    ": expected op to name an op of the table, got '", name,
                    "'. Nearest: ", nearest_names(wanted, names_like(has_overload)),
                    ". policies.register_op (C++ register_op) adds an op of your own.");
  return overloads;
}

std::vector<PolicyDevice> find_policy_devices(const char* function,
                                              std::optional<c10::DeviceType> device) {
  if (!device.has_value()) {
    return {PolicyDevice::kCpu, PolicyDevice::kCuda};
  }
  TORCH_CHECK_VALUE(*device == c10::kCPU || *device == c10::kCUDA, function,
                    ": expected device to be cpu or cuda, got ", c10::DeviceTypeName(*device, true),
                    ".");
  return {*device == c10::kCPU ? PolicyDevice::kCpu : PolicyDevice::kCuda};
}

void check_can_carry(const char* function, OpId op, OpPolicy policy) {
  if (op == kEveryOp) {
    TORCH_CHECK_VALUE(policy == OpPolicy::kUnify || policy == OpPolicy::kPass, function,
                      ": expected policy 'unify' or 'pass' for '*', which stands for every op "
                      "without a policy, got '",
                      to_string(policy), "'.");
    return;
  }
  check_can_carry(function, short_name(op), capabilities_of(op), policy);
}

void check_can_carry(const char* function, std::string_view op, const OpCapabilities& capabilities,
                     OpPolicy policy) {
  TORCH_CHECK_VALUE(can_carry(capabilities, policy), function, ": expected a policy that ", op,
                    " can carry, got '", to_string(policy), "', which needs ",
                    what_it_needs(policy), ".");
}

void throw_banned(OpId op, PolicyDevice device) {
  const auto name = full_name(op);
  const auto where = c10::DeviceTypeName(device_type(device), /*lower_case=*/true);
  TORCH_CHECK(op != OpId::binary_cross_entropy, name, ": not allowed under autocast on ", where,
              ", because the logarithm of a float16 probability easily overflows. Use "
              "binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss) on the values before "
              "the sigmoid, or run "
              "this op in float32 in a region with enabled=False (in C++ AutocastGuard(device, {}, "
              "false)).");
  TORCH_CHECK(false, name, ": not allowed under autocast on ", where,
              " (its policy is 'banned'). Run it in a region with enabled=False (in C++ "
              "AutocastGuard(device, {}, false)) or change the policy.");
}

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names;
  names.reserve(kPolicyNames.size());
  for (const auto& [policy, name] : kPolicyNames) {
    names.push_back(name);
  }
  return names;
}

OpPolicy policy_named(const char* what, std::string_view name) {
  for (const auto& [policy, policy_name] : kPolicyNames) {
    if (policy_name == name) {
      return policy;
    }
  }
  TORCH_CHECK_VALUE(false, what, " to be one of ", c10::Join(", ", policy_names()), ", got '", name,
                    "'.");
}

}  // namespace autocast

std::string_view to_string(OpPolicy policy) {
  return std::ranges::find(autocast::kPolicyNames, policy,
                           [](const auto& pair) { return pair.first; })
      ->second;
}

OpPolicy op_policy_from_string(std::string_view name) {
  return autocast::policy_named("op_policy_from_string: expected name", name);
}

}  // namespace fastamp
