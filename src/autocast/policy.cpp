#include "autocast/op_names.h"
#include "autocast/policy_table.h"
#include "autocast/registration.h"

#include <fastamp/autocast/policy.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <utility>

namespace fastamp {
namespace {

using autocast::Column;
using autocast::OpId;

constexpr std::array<std::pair<OpPolicy, std::string_view>, 7> kNames{{
    {OpPolicy::pass, "pass"},
    {OpPolicy::lower, "lower"},
    {OpPolicy::fp32, "fp32"},
    {OpPolicy::set_opt_dtype, "set_opt_dtype"},
    {OpPolicy::append_dtype, "append_dtype"},
    {OpPolicy::promote, "promote"},
    {OpPolicy::banned, "banned"},
}};

}  // namespace

std::string_view to_string(OpPolicy policy) {
  return std::ranges::find(kNames, policy, [](const auto& pair) { return pair.first; })->second;
}

OpPolicy autocast::policy_named(const char* what, std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& [policy, policy_name] : kNames) {
    if (policy_name == name) {
      return policy;
    }
    known.push_back(policy_name);
  }
  TORCH_CHECK_VALUE(false, what, " to be one of ", c10::Join(", ", known), ", got '", name, "'.");
}

OpPolicy op_policy_from_string(std::string_view name) {
  return autocast::policy_named("op_policy_from_string: expected name", name);
}

std::vector<OpTableRow> op_table() {
  autocast::ensure_policies_loaded();
  std::vector<OpTableRow> rows;
  for (const OpId op : autocast::all_ops()) {
    rows.push_back({autocast::short_name(op), autocast::process_policy_of(op, Column::cpu),
                    autocast::process_policy_of(op, Column::cuda),
                    autocast::default_policy(op, Column::cpu),
                    autocast::default_policy(op, Column::cuda)});
  }
  return rows;
}

OpPolicy op_policy(std::string_view op, c10::DeviceType device) {
  autocast::ensure_policies_loaded();
  const Column column = autocast::find_columns("op_policy", device).front();
  const auto ops = autocast::find_ops("op_policy", op);
  const OpPolicy policy = autocast::policy_of(ops.front(), column);
  for (const OpId other : ops) {
    TORCH_CHECK_VALUE(autocast::policy_of(other, column) == policy,
                      "op_policy: expected op to name one policy, got '", op,
                      "', whose overloads differ. Name one of them, such as '",
                      autocast::short_name(other), "'.");
  }
  return policy;
}

void set_op_policy(std::string_view op, OpPolicy policy, std::optional<c10::DeviceType> device) {
  autocast::ensure_policies_loaded();
  const auto columns = autocast::find_columns("set_op_policy", device);
  const auto ops = autocast::find_ops("set_op_policy", op);
  for (const OpId each : ops) {
    autocast::check_can_carry("set_op_policy", each, policy);
  }
  for (const OpId each : ops) {
    for (const Column column : columns) {
      autocast::set_policy(each, column, policy);
      if (policy != OpPolicy::pass) {
        autocast::ensure_registered(each, column);
      }
    }
  }
}

void reset_op_policies() {
  autocast::ensure_policies_loaded();
  autocast::load_default_policies();
}

}  // namespace fastamp
