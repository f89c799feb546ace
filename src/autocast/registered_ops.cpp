#include "autocast/registered_ops.h"

#include "autocast/boxed_kernel.h"
#include "autocast/op_kernel.h"
#include "autocast/op_names.h"
#include "autocast/policy_table.h"
#include "autocast/registration.h"

#include <fastamp/autocast/policy.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fastamp {
namespace autocast {
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
                                  : " Nearest: " + nearest_names(name, known) + ".");
  return found;
}

std::string joined(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void check_not_in_table(const std::string& name) {
  for (const auto& entry : kernel_entries()) {
    TORCH_CHECK_VALUE(entry.qualified_name() != name,
                      "register_op: expected an op that is not in the table, got '", name,
                      "'. Use set_op_policy to change its policy.");
  }
}

std::vector<RegisteredOp> candidates(const std::string& name) {
  std::vector<RegisteredOp> ops;
  for (const auto& found : find_schemas(name)) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(found.name.c_str(),
                                                                   found.overload_name.c_str());
    ops.push_back(
        {joined(found), boxed_capabilities(op.schema()), {OpPolicy::pass, OpPolicy::pass}, false});
    check_not_in_table(ops.back().name);
  }
  return ops;
}

/// The id of a name, new or old.
OpId id_of(const RegisteredOp& op) {
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

void activate(OpId id, OpPolicy policy, const std::vector<Column>& columns) {
  {
    const std::scoped_lock lock(list().mutex);
    RegisteredOp& op = list().ops[static_cast<std::size_t>(id) - kNumOps];
    op.active = true;
    for (const Column column : columns) {
      op.defaults[static_cast<std::size_t>(column)] = policy;
    }
  }
  for (const Column column : columns) {
    set_policy(id, column, policy);
    ensure_registered(id, column);
  }
}

void deactivate(OpId id) {
  for (const Column column : {Column::cpu, Column::cuda}) {
    drop_registration(id, column);
    set_policy(id, column, OpPolicy::pass);
  }
  const std::scoped_lock lock(list().mutex);
  RegisteredOp& op = list().ops[static_cast<std::size_t>(id) - kNumOps];
  op.active = false;
  op.defaults.fill(OpPolicy::pass);
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

torch::Library implement_registered(OpId op, Column column) {
  const std::string name = registered_op(op).name;
  torch::Library library(torch::Library::IMPL, name.substr(0, name.find("::")),
                         autocast_key(column), __FILE__, __LINE__);
  library.impl(name.c_str(),
               torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel>(op, column)));
  return library;
}

}  // namespace autocast

void register_op(const std::string& name, OpPolicy policy, std::optional<c10::DeviceType> device) {
  autocast::ensure_policies_loaded();
  const auto columns = autocast::find_columns("register_op", device);
  auto ops = autocast::candidates(name);
  // Of a name without overload the out= variants stay out, as in torch's own lists: of what can be
  // cast, if anything can, even for a policy that casts nothing, since it may be changed later.
  const auto keep_those = [&](const auto& is_wanted) {
    if (std::ranges::any_of(ops, is_wanted)) {
      std::erase_if(ops, [&](const auto& op) { return !is_wanted(op); });
    }
  };
  keep_those([](const auto& op) { return op.capabilities.lower; });
  keep_those([&](const auto& op) { return can_carry(op.capabilities, policy); });
  autocast::check_can_carry("register_op", ops.front().name, ops.front().capabilities, policy);
  for (const auto& op : ops) {
    autocast::activate(autocast::id_of(op), policy, columns);
  }
}

void unregister_op(const std::string& name) {
  // Of a name without overload all that register_op() added under it.
  auto ops = autocast::find_ops("unregister_op", name);
  if (name.find('.') == std::string::npos) {
    ops = autocast::find_ops("unregister_op", name + ".*");
  }
  for (const auto op : ops) {
    TORCH_CHECK_VALUE(static_cast<std::size_t>(op) >= autocast::kNumOps,
                      "unregister_op: expected an op that register_op added, got '", name,
                      "', which is in the table. Use set_op_policy(..., 'pass') instead.");
  }
  for (const auto op : ops) {
    autocast::deactivate(op);
  }
}

}  // namespace fastamp
