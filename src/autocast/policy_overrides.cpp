#include "autocast/policy_overrides.h"

#include "autocast/op_names.h"
#include "autocast/registration.h"

#include <fastamp/autocast/op_policy_guard.h>

#include <utility>

namespace fastamp {
namespace autocast {

std::atomic<int> g_overriding_threads{0};

namespace {

/// Counts its thread in while it holds something, and out at the thread's end.
class ThreadOverrides {
 public:
  ThreadOverrides() = default;
  ThreadOverrides(const ThreadOverrides&) = delete;
  ThreadOverrides& operator=(const ThreadOverrides&) = delete;
  ThreadOverrides(ThreadOverrides&&) = delete;
  ThreadOverrides& operator=(ThreadOverrides&&) = delete;
  ~ThreadOverrides() { exchange(nullptr); }

  const SharedOverrides& get() const { return held_; }

  SharedOverrides exchange(SharedOverrides next) {
    const int change = static_cast<int>(next != nullptr) - static_cast<int>(held_ != nullptr);
    g_overriding_threads.fetch_add(change, std::memory_order_relaxed);
    return std::exchange(held_, std::move(next));
  }

 private:
  SharedOverrides held_;
};

ThreadOverrides& thread_overrides() {
  thread_local ThreadOverrides overrides;
  return overrides;
}

struct Checked {
  std::vector<OpId> ops;
  std::vector<Column> columns;
  OpPolicy policy;
};

Checked checked(const OpPolicyEdit& edit) {
  constexpr const char* kFunction = "op_policies";
  Checked result{find_ops(kFunction, edit.op), find_columns(kFunction, edit.device), edit.policy};
  for (const OpId op : result.ops) {
    check_can_carry(kFunction, op, edit.policy);
  }
  return result;
}

}  // namespace

std::optional<OpPolicy> overridden_policy(OpId op, Column column) {
  const auto& held = thread_overrides().get();
  if (held == nullptr) {
    return std::nullopt;
  }
  const auto policy =
      held->policies[static_cast<std::size_t>(column)][static_cast<std::size_t>(op)];
  return policy == PolicyOverrides::kNone ? std::nullopt
                                          : std::optional(static_cast<OpPolicy>(policy));
}

}  // namespace autocast

namespace detail {

SharedOverrides thread_op_policies() { return autocast::thread_overrides().get(); }

SharedOverrides exchange_op_policies(SharedOverrides next) {
  return autocast::thread_overrides().exchange(std::move(next));
}

SharedOverrides with_op_policies(const SharedOverrides& base,
                                 const std::vector<OpPolicyEdit>& edits) {
  autocast::ensure_policies_loaded();
  std::vector<autocast::Checked> all;
  all.reserve(edits.size());
  for (const auto& edit : edits) {
    all.push_back(autocast::checked(edit));
  }
  auto made = base == nullptr ? std::make_shared<autocast::PolicyOverrides>()
                              : std::make_shared<autocast::PolicyOverrides>(*base);
  for (const auto& [ops, columns, policy] : all) {
    for (const auto op : ops) {
      for (const auto column : columns) {
        made->policies[static_cast<std::size_t>(column)][static_cast<std::size_t>(op)] =
            static_cast<std::uint8_t>(policy);
        if (policy != OpPolicy::pass) {
          autocast::ensure_registered(op, column);
        }
      }
    }
  }
  return made;
}

}  // namespace detail

OpPolicyGuard::OpPolicyGuard(const std::vector<OpPolicyEdit>& edits)
    : saved_(detail::exchange_op_policies(
          detail::with_op_policies(detail::thread_op_policies(), edits))) {}

OpPolicyGuard::~OpPolicyGuard() { detail::exchange_op_policies(std::move(saved_)); }

}  // namespace fastamp
