// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/policy.h>
#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fastamp {

namespace autocast {
struct PolicyOverrides;
}

/// One change of the op lists; the members are the arguments of set_op_policy().
struct OpPolicyEdit {
  std::string op;
  OpPolicy policy;
  std::optional<c10::DeviceType> device = std::nullopt;  ///< None: CPU and CUDA.
};

namespace detail {

/// A thread's overrides as a value; null where there are none.
using SharedOverrides = std::shared_ptr<const autocast::PolicyOverrides>;

/// Returns what is in force on this thread.
FASTAMP_API SharedOverrides thread_op_policies();

/// The edits as a value.
/// @param function  The function that errors name as their source.
/// @throws c10::ValueError as set_op_policy() does; nothing is changed then.
FASTAMP_API SharedOverrides checked_op_policies(const char* function,
                                                const std::vector<OpPolicyEdit>& edits);

enum class OverrideMode : std::uint8_t {
  kAdd,      ///< Adds to the overrides of enclosing blocks, and wins over them.
  kReplace,  ///< Hides the overrides of enclosing blocks.
};

/// Puts overrides in force on this thread until they are popped, in any order.
FASTAMP_API std::uint64_t push_op_policies(SharedOverrides policies, OverrideMode mode);
/// False, with nothing changed, if the overrides with this id are not in force on this thread.
FASTAMP_API bool pop_op_policies(std::uint64_t id);

}  // namespace detail

/// Changes op policies on this thread until it is destroyed; wins over set_op_policy().
///
/// @code
///   fastamp::OpPolicyGuard policies({{"layer_norm", fastamp::OpPolicy::kLower, torch::kCUDA}});
/// @endcode
///
/// Guards nest: an inner one adds its changes to the outer one's; they may end in any order. They
/// have an effect inside autocast regions only. Other threads keep their policies, also those on
/// which backward runs CUDA ops: these have the process's. A guard must end on the thread that made
/// it: ending it on another one changes nothing and warns once per process.
class FASTAMP_API OpPolicyGuard {
 public:
  /// @throws c10::ValueError for an unknown op (naming the nearest ones) or device, or a policy
  ///     that an op cannot carry; nothing is changed then.
  /// @note The first policy other than pass for an op that torch does not autocast on that device
  ///     registers a kernel: see set_op_policy().
  explicit OpPolicyGuard(const std::vector<OpPolicyEdit>& edits);
  ~OpPolicyGuard() { release(); }

  OpPolicyGuard(const OpPolicyGuard&) = delete;
  OpPolicyGuard& operator=(const OpPolicyGuard&) = delete;
  OpPolicyGuard(OpPolicyGuard&&) = delete;
  OpPolicyGuard& operator=(OpPolicyGuard&&) = delete;

  /// Takes the changes back early. Does nothing the second time.
  void release() noexcept;

 private:
  std::uint64_t id_;
};

}  // namespace fastamp
