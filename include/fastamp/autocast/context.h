// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <vector>

namespace c10 {
struct IValue;
}

namespace fastamp {

/// State of autocast on a thread: that of its regions on every device, their fp8 recipes
/// included, and the changes of op policies. A value: take it where a region is open and put it in
/// force elsewhere, such as in the backward of an autograd function or on the threads of a pool.
///
/// @code
///   struct Linear : torch::autograd::Function<Linear> {
///     static torch::Tensor forward(torch::autograd::AutogradContext* ctx, ...) {
///       ctx->saved_data["autocast"] = fastamp::AutocastContext::current().to_ivalue();
///       ...
///     }
///     static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, ...) {
///       const fastamp::AutocastContextGuard as_in_forward(
///           fastamp::AutocastContext::from_ivalue(ctx->saved_data["autocast"]));
///       ...
///     }
///   };
/// @endcode
///
/// Keeps no tensors and no casts. Copies are cheap; different objects may be used by different
/// threads. Source: torch.amp.custom_fwd and custom_bwd, which do the same for Python.
class FASTAMP_API AutocastContext {
 public:
  /// Returns what is in force on the calling thread.
  static AutocastContext current();

  /// Converts for AutogradContext::saved_data and other places that hold IValues.
  c10::IValue to_ivalue() const;

  /// @throws c10::ValueError if the value did not come from to_ivalue().
  static AutocastContext from_ivalue(const c10::IValue& value);

  /// Whether ops on a device were autocast.
  bool enabled(c10::DeviceType device) const;

 private:
  friend class AutocastContextGuard;
  AutocastContext() = default;

  /// CPU, CUDA, and other devices for which autocast was on.
  std::vector<detail::AutocastState> devices_;
  detail::SharedOverrides policies_;
};

/// Puts a context in force on the calling thread, from construction to destruction.
///
/// It hides the thread's own regions: on a device for which the context has none, ops are not
/// autocast. Like AutocastGuard, it may end in any order, but only on its own thread.
class FASTAMP_API AutocastContextGuard {
 public:
  explicit AutocastContextGuard(const AutocastContext& context);
  ~AutocastContextGuard() { release(); }

  AutocastContextGuard(const AutocastContextGuard&) = delete;
  AutocastContextGuard& operator=(const AutocastContextGuard&) = delete;
  AutocastContextGuard(AutocastContextGuard&&) = delete;
  AutocastContextGuard& operator=(AutocastContextGuard&&) = delete;

  /// Ends it early. Does nothing the second time.
  void release() noexcept;

 private:
  std::vector<detail::RegionId> regions_;
  std::uint64_t policies_ = 0;
};

}  // namespace fastamp
