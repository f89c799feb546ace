#pragma once

#include <fastamp/autocast/policy.h>
#include <fastamp/export.h>

#include <c10/core/DeviceType.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fastamp {

namespace autocast {
struct PolicyOverrides;
}

/// One change of the op lists: as the arguments of set_op_policy().
struct OpPolicyEdit {
  std::string op;
  OpPolicy policy;
  std::optional<c10::DeviceType> device = std::nullopt;  ///< None: CPU and CUDA.
};

namespace detail {

/// A thread's overrides as a value; null where there are none.
using SharedOverrides = std::shared_ptr<const autocast::PolicyOverrides>;

FASTAMP_API SharedOverrides thread_op_policies();
FASTAMP_API SharedOverrides exchange_op_policies(SharedOverrides next);
/// @throws c10::ValueError as set_op_policy() does; nothing is changed then.
FASTAMP_API SharedOverrides with_op_policies(const SharedOverrides& base,
                                             const std::vector<OpPolicyEdit>& edits);

}  // namespace detail

/// Changes op policies on this thread until it is destroyed, over set_op_policy()'s.
///
/// @code
///   fastamp::OpPolicyGuard policies({{"layer_norm", fastamp::OpPolicy::lower, torch::kCUDA}});
/// @endcode
///
/// Guards nest: an inner one adds its changes to the outer one's. They have an effect inside
/// autocast regions only. Other threads are not touched, and the threads on which backward runs
/// CUDA ops have the process's policies.
class FASTAMP_API OpPolicyGuard {
 public:
  /// @throws c10::ValueError for an unknown op (naming the nearest ones) or device, or a policy
  /// that
  ///         an op cannot carry; nothing is changed then.
  /// @note The first policy other than pass for an op that torch does not autocast on that device
  ///       registers a kernel: see set_op_policy().
  explicit OpPolicyGuard(const std::vector<OpPolicyEdit>& edits);
  ~OpPolicyGuard();

  OpPolicyGuard(const OpPolicyGuard&) = delete;
  OpPolicyGuard& operator=(const OpPolicyGuard&) = delete;
  OpPolicyGuard(OpPolicyGuard&&) = delete;
  OpPolicyGuard& operator=(OpPolicyGuard&&) = delete;

 private:
  detail::SharedOverrides saved_;
};

}  // namespace fastamp
