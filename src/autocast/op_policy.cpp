// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_policy.h"

#include "core/thread_bound.h"

#include <fastamp/autocast/op_policy_guard.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fastamp {
namespace autocast {
namespace {

using Policies = std::array<std::array<OpPolicy, kNumOps>, kNumPolicyDevices>;

/// The op table as written.
constexpr Policies written_policies() {
  // NOLINTBEGIN(readability-identifier-naming): the table's words
  constexpr auto pass = OpPolicy::kPass;
  constexpr auto lower = OpPolicy::kLower;
  constexpr auto fp32 = OpPolicy::kFp32;
  constexpr auto set_opt_dtype = OpPolicy::kSetOptDtype;
  constexpr auto append_dtype = OpPolicy::kAppendDtype;
  constexpr auto promote = OpPolicy::kPromote;
  constexpr auto banned = OpPolicy::kBanned;
  // NOLINTEND(readability-identifier-naming)
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
  if (op == kEveryOp) {
    return OpPolicy::kPass;
  }
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
    set_policy(kEveryOp, device, OpPolicy::kPass);
  }
}

std::atomic<int> g_overriding_threads{0};

namespace {

using detail::OverrideMode;

/// `over` laid over `base`.
SharedOverrides laid_over(const SharedOverrides& base, const SharedOverrides& over) {
  if (base == nullptr || over == nullptr) {
    return base == nullptr ? over : base;
  }
  auto sum = std::make_shared<PolicyOverrides>(*base);
  for (std::size_t device = 0; device < kNumPolicyDevices; ++device) {
    for (std::size_t op = 0; op < kNumSlots; ++op) {
      // Without a branch, so that the compiler takes many at a time.
      const auto policy = over->policies[device][op];
      auto& below = sum->policies[device][op];
      below = policy == PolicyOverrides::kNone ? below : policy;
    }
  }
  return sum;
}

/// Changes of one guard or block.
struct Layer {
  std::uint64_t id;
  SharedOverrides policies;
  OverrideMode mode;
  SharedOverrides sum;  ///< Of this layer and those below.
};

/// The layers of a thread, outermost first, and their sum.
class ThreadOverrides {
 public:
  ThreadOverrides() = default;
  ThreadOverrides(const ThreadOverrides&) = delete;
  ThreadOverrides& operator=(const ThreadOverrides&) = delete;
  ThreadOverrides(ThreadOverrides&&) = delete;
  ThreadOverrides& operator=(ThreadOverrides&&) = delete;
  /// A thread that ends inside a block ends it.
  ~ThreadOverrides() { hold(nullptr); }

  const SharedOverrides& in_force() const { return in_force_; }

  std::uint64_t push(SharedOverrides policies, OverrideMode mode) {
    const auto id = ids_.next();
    layers_.push_back({id, std::move(policies), mode, nullptr});
    try {
      sum_from(layers_.size() - 1);
    } catch (...) {
      layers_.pop_back();
      throw;
    }
    return id;
  }

  /// False if there is no such layer. Allocates only if it is not the innermost one.
  bool pop(std::uint64_t id) {
    const auto layer = std::ranges::find(layers_, id, &Layer::id);
    if (layer == layers_.end()) {
      return false;
    }
    const auto position = static_cast<std::size_t>(layer - layers_.begin());
    layers_.erase(layer);
    sum_from(position);
    return true;
  }

 private:
  void sum_from(std::size_t position) {
    SharedOverrides sum = position == 0 ? nullptr : layers_[position - 1].sum;
    for (; position < layers_.size(); ++position) {
      Layer& layer = layers_[position];
      layer.sum =
          layer.mode == OverrideMode::kAdd ? laid_over(sum, layer.policies) : layer.policies;
      sum = layer.sum;
    }
    hold(std::move(sum));
  }

  /// Counts the thread as overriding while it holds something.
  void hold(SharedOverrides next) {
    const int change = static_cast<int>(next != nullptr) - static_cast<int>(in_force_ != nullptr);
    g_overriding_threads.fetch_add(change, std::memory_order_relaxed);
    in_force_ = std::move(next);
  }

  std::vector<Layer> layers_;
  SerialNumbers ids_;
  SharedOverrides in_force_;
};

}  // namespace

std::optional<OpPolicy> overridden_policy(OpId op, PolicyDevice device) {
  const auto* overrides = PerThread<ThreadOverrides>::get();
  if (overrides == nullptr || overrides->in_force() == nullptr) {
    return std::nullopt;
  }
  const auto& held = overrides->in_force();
  const auto policy =
      held->policies[static_cast<std::size_t>(device)][static_cast<std::size_t>(op)];
  return policy == PolicyOverrides::kNone ? std::nullopt
                                          : std::optional(static_cast<OpPolicy>(policy));
}

}  // namespace autocast

namespace detail {

using Overrides = PerThread<autocast::ThreadOverrides>;

SharedOverrides thread_op_policies() {
  const auto* overrides = Overrides::get();
  return overrides == nullptr ? nullptr : overrides->in_force();
}

std::uint64_t push_op_policies(SharedOverrides policies, OverrideMode mode) {
  return Overrides::make().push(std::move(policies), mode);
}

bool pop_op_policies(std::uint64_t id) {
  auto* overrides = Overrides::get();
  return overrides != nullptr && overrides->pop(id);
}

}  // namespace detail

}  // namespace fastamp
