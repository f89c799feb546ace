// SPDX-License-Identifier: Apache-2.0
#include "autocast/unify_kernels.h"

#include "autocast/op_policy.h"
#include "autocast/unify.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace fastamp::autocast {
namespace {

/// Namespaces whose ops do something else than arithmetic: messages between processes, which all
/// have to have one dtype, torch's own tools, what its compilers make, and fastamp's ops.
constexpr std::array<std::string_view, 14> kOtherNamespaces{"_c10d_functional",
                                                            "_c10d_functional_autograd",
                                                            "_dtensor",
                                                            "c10d",
                                                            "debug_mode_ops",
                                                            "debugprims",
                                                            "export",
                                                            "fastamp",
                                                            "fsdp",
                                                            "inductor",
                                                            "prims",
                                                            "profiler",
                                                            "static_runtime",
                                                            "symm_mem"};

/// Ops that make one tensor another's alias, which a cast would not be.
constexpr std::array<std::string_view, 1> kAliasing{"aten::set_"};

std::string_view namespace_of(std::string_view name) { return name.substr(0, name.find("::")); }

bool is_reached(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return can_unify(op.schema()) &&
         std::ranges::find(kOtherNamespaces, namespace_of(name)) == kOtherNamespaces.end() &&
         std::ranges::find(kAliasing, name) == kAliasing.end();
}

std::optional<OpId> id_in_table(const c10::OperatorName& name) {
  static const auto ids = [] {
    std::unordered_map<c10::OperatorName, OpId> found;
    for (std::size_t op = 0; op < kNumOps; ++op) {
      const auto& entry = kernel_entries()[op];
      found.emplace(c10::OperatorName(entry.name, entry.overload), static_cast<OpId>(op));
    }
    return found;
  }();
  const auto found = ids.find(name);
  return found == ids.end() ? std::nullopt : std::optional(found->second);
}

/// Runs an op as the policy of every op says, unless it has one of its own.
class UnifyKernel final : public c10::OperatorKernel {
 public:
  /// An op of the table with the kernel that has its policy.
  struct Listed {
    OpId id;
    c10::SafeKernelFunction kernel;
  };

  UnifyKernel(PolicyDevice device, std::optional<Listed> listed)
      : device_(device), listed_(std::move(listed)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    if (listed_.has_value() && policy_of(listed_->id, device_) != OpPolicy::kPass) {
      listed_->kernel.callBoxed(op, keys, stack);
      return;
    }
    const auto below =
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, autocast_key(device_));
    if (policy_of(kEveryOp, device_) == OpPolicy::kUnify) {
      call_unified(op, below, stack, device_);
    } else {
      op.redispatchBoxed(below, stack);
    }
  }

 private:
  PolicyDevice device_;
  std::optional<Listed> listed_;
};

}  // namespace

void UnifyKernels::add_all() {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    add(name);
  }
}

void UnifyKernels::add(const c10::OperatorName& name) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (reached_.contains(name) || !op.has_value() || !is_reached(*op)) {
    return;
  }
  const auto key = autocast_key(device_);
  std::optional<UnifyKernel::Listed> listed;
  if (op->hasKernelForDispatchKey(key)) {
    const auto id = id_in_table(name);
    if (!id.has_value() || process_policy_of(*id, device_) != OpPolicy::kPass) {
      return;  // Others' kernels, and policies of the op's own.
    }
    listed.emplace(*id, op->getComputedKernelForDispatchKey(key));
  }
  const std::string space(namespace_of(name.name));
  const auto library = libraries_
                           .try_emplace(space, torch::Library::IMPL, space, key, __FILE__,
                                        static_cast<std::uint32_t>(__LINE__))
                           .first;
  library->second.impl(c10::toString(name).c_str(),
                       torch::CppFunction::makeFromBoxedFunctor(
                           std::make_unique<UnifyKernel>(device_, std::move(listed))));
  reached_.insert(name);
}

void UnifyKernels::add_over(OpId op) {
  const auto& entry = kernel_entries()[static_cast<std::size_t>(op)];
  const c10::OperatorName name(entry.name, entry.overload);
  reached_.erase(name);
  add(name);
}

}  // namespace fastamp::autocast
