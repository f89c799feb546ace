#include "autocast/kernel_entry.h"
#include "autocast/policy_table.h"
#include "autocast/registration.h"

#include <fastamp/autocast/policy.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <numeric>
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

/// Name as users write it: without "aten::".
std::string short_name(const autocast::KernelEntry& entry) {
  constexpr std::size_t kNamespaceLength = std::string_view("aten::").size();
  return entry.qualified_name().substr(kNamespaceLength);
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

std::string nearest_names(std::string_view wanted) {
  constexpr std::size_t kShown = 3;
  std::vector<std::pair<std::size_t, std::string>> ranked;
  for (const auto& entry : autocast::kernel_entries()) {
    auto name = short_name(entry);
    ranked.emplace_back(edit_distance(wanted, name), std::move(name));
  }
  std::partial_sort(ranked.begin(), ranked.begin() + kShown, ranked.end());
  std::vector<std::string> names;
  names.reserve(kShown);
  for (std::size_t i = 0; i < kShown; ++i) {
    names.push_back(ranked[i].second);
  }
  return c10::Join(", ", names);
}

/// The ops that `name` stands for: one if it has an overload, all overloads if not.
std::vector<OpId> find_ops(const char* function, std::string_view name) {
  std::string_view wanted = name;
  if (wanted.starts_with("aten::")) {
    wanted.remove_prefix(std::string_view("aten::").size());
  }
  std::vector<OpId> exact;
  std::vector<OpId> overloads;
  const auto& entries = autocast::kernel_entries();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto full = short_name(entries[i]);
    if (full == wanted && *entries[i].overload != '\0') {
      exact.push_back(static_cast<OpId>(i));
    }
    if (std::string_view(full).substr(0, full.find('.')) == wanted) {
      overloads.push_back(static_cast<OpId>(i));
    }
  }
  auto& found = exact.empty() ? overloads : exact;
  TORCH_CHECK_VALUE(!found.empty(), function, ": expected op to name an op of the table, got '",
                    name, "'. Nearest: ", nearest_names(wanted), ".");
  return std::move(found);
}

Column find_column(const char* function, c10::DeviceType device) {
  TORCH_CHECK_VALUE(device == c10::kCPU || device == c10::kCUDA, function,
                    ": expected device to be cpu or cuda, got ", c10::DeviceTypeName(device, true),
                    ".");
  return device == c10::kCPU ? Column::cpu : Column::cuda;
}

void check_can_carry(OpId op, OpPolicy policy) {
  const auto& entry = autocast::kernel_entries()[static_cast<std::size_t>(op)];
  TORCH_CHECK_VALUE(autocast::can_carry(entry.capabilities, policy),
                    "set_op_policy: expected a policy that ", short_name(entry),
                    " can carry, got '", to_string(policy), "', which needs ",
                    policy == OpPolicy::set_opt_dtype  ? "an optional dtype argument."
                    : policy == OpPolicy::append_dtype ? "an overload with an output dtype."
                                                       : "arguments that can be cast so.");
}

}  // namespace

std::string_view to_string(OpPolicy policy) {
  return std::ranges::find(kNames, policy, [](const auto& pair) { return pair.first; })->second;
}

OpPolicy op_policy_from_string(std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& [policy, policy_name] : kNames) {
    if (policy_name == name) {
      return policy;
    }
    known.push_back(policy_name);
  }
  TORCH_CHECK_VALUE(false, "expected policy to be one of ", c10::Join(", ", known), ", got '", name,
                    "'.");
}

std::vector<OpTableRow> op_table() {
  autocast::ensure_policies_loaded();
  std::vector<OpTableRow> rows;
  rows.reserve(autocast::kNumOps);
  for (std::size_t i = 0; i < autocast::kNumOps; ++i) {
    const auto op = static_cast<OpId>(i);
    rows.push_back({short_name(autocast::kernel_entries()[i]), autocast::policy_of(op, Column::cpu),
                    autocast::policy_of(op, Column::cuda),
                    autocast::default_policy(op, Column::cpu),
                    autocast::default_policy(op, Column::cuda)});
  }
  return rows;
}

OpPolicy op_policy(std::string_view op, c10::DeviceType device) {
  autocast::ensure_policies_loaded();
  const Column column = find_column("op_policy", device);
  const auto ops = find_ops("op_policy", op);
  const OpPolicy policy = autocast::policy_of(ops.front(), column);
  for (const OpId other : ops) {
    TORCH_CHECK_VALUE(autocast::policy_of(other, column) == policy,
                      "op_policy: expected op to name one policy, got '", op,
                      "', whose overloads differ. Name an overload, such as '",
                      short_name(autocast::kernel_entries()[static_cast<std::size_t>(other)]),
                      "'.");
  }
  return policy;
}

void set_op_policy(std::string_view op, OpPolicy policy, std::optional<c10::DeviceType> device) {
  autocast::ensure_policies_loaded();
  std::vector<Column> columns{Column::cpu, Column::cuda};
  if (device.has_value()) {
    columns = {find_column("set_op_policy", *device)};
  }
  const auto ops = find_ops("set_op_policy", op);
  for (const OpId each : ops) {
    check_can_carry(each, policy);
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
