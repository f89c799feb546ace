// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/scaler/on_skip.h>
#include <fastamp/scaler/reports.h>
#include <fastamp/scaler/step_guard_options.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fastamp {

/// Memory of a StepGuard between steps.
struct FASTAMP_API StepGuardState {
  std::vector<StepRecord> history;  ///< Of consecutive steps, oldest first; the scale is 1.
  OverflowReport overflow_report;   ///< Parameters by number.
  std::int64_t skipped_in_a_row = 0;
  std::optional<SpikeState> spike;  ///< Of a guard that skips spikes.
};

/// Skips the steps of an optimizer whose gradients are not finite, for programs without a gradient
/// scaler: in bfloat16, float32 and fp8 nobody scales, and so nobody checks.
///
/// @code
///   fastamp::StepGuard guard(optimizer);
///   loss.backward();
///   guard.clip_grad_norm_(1.0);  // If gradients are to be clipped.
///   guard.step();                // In place of optimizer.step().
/// @endcode
///
/// A skipped step changes no bit of parameters, moments and step counts; one that is not skipped is
/// optimizer.step(), bit for bit. With an optimizer of fastamp::optim, or one that optim::fuse_()
/// was called on, the device decides, and nothing waits for it; with any other, step() waits for
/// one flag. Not thread-safe. Neither copied nor moved.
class FASTAMP_API StepGuard {
 public:
  /// @param optimizer  Has to outlive the guard.
  /// @param options    What else is skipped for, what is reported, and which ranks agree.
  /// @throws c10::ValueError if an option is out of its range, or the optimizer an LBFGS, whose
  ///     step evaluates gradients more than once.
  explicit StepGuard(torch::optim::Optimizer& optimizer, const StepGuardOptions& options = {});
  ~StepGuard();
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

  /// Steps the optimizer unless a gradient is inf or NaN, or another reason of the options says so.
  /// Without a gradient it is optimizer.step(), unless there is an agreement.
  /// @param closure  Called first, once, with gradients enabled; computes them and the loss.
  /// @returns What the closure or else optimizer.step() returned; nullopt if neither was called.
  /// @throws c10::Error if more steps in a row were skipped than max_consecutive, as soon as that
  ///     is known: on CUDA up to some steps later. The step itself is over by then.
  std::optional<at::Tensor> step(const torch::optim::Optimizer::LossClosure& closure = nullptr);

  /// Clips gradients by the norm of all of them, at the step: the pass that checks them sums it.
  /// Until then they are as they were, but for sparse ones, which are clipped at once.
  /// @param max_norm   Largest norm that is left.
  /// @param norm_type  Order of the norm; may be infinite. Orders but 2 cost a pass of their own.
  /// @param error_if_nonfinite  Refuse a norm that is inf or NaN; waits for the device.
  /// @returns the norm before clipping, a scalar tensor; 0 if there are no gradients.
  /// @throws c10::Error for a norm that is not finite, if asked to.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0,
                             bool error_if_nonfinite = false);

  /// Skips the next step too if a loss is inf or NaN. Does not wait for the device.
  /// @param loss  Of one element and a floating dtype.
  /// @throws c10::ValueError for any other tensor.
  void check_loss(const at::Tensor& loss);

  /// Whether the last step was skipped. Waits only if the device has not come that far.
  bool step_was_skipped();
  /// Number of steps in a row that were skipped until now. Waits likewise.
  std::int64_t skipped_in_a_row();
  /// Returns which gradients were not finite at the last skipped step; none if that was a spike or
  /// a loss. Waits for the device.
  /// @param named_parameters  module->named_parameters(), where names come from.
  OverflowReport overflow_report(
      const torch::OrderedDict<std::string, at::Tensor>& named_parameters =
          torch::OrderedDict<std::string, at::Tensor>());
  /// The last steps, oldest first. Waits for the device.
  std::vector<StepRecord> history() const;
  /// Calls a function for each skipped step, as GradScaler::register_on_skip() does: on the CPU by
  /// the step itself, on CUDA by the first step() or question that finds the answer there.
  /// @throws c10::ValueError if the callback is empty.
  SkipHandle register_on_skip(SkipCallback callback, bool wait = false);

  /// Returns what to store in a checkpoint. Waits for the device.
  StepGuardState state();
  /// Continues from a state.
  /// @throws c10::ValueError if its counts are negative, the steps of its history not consecutive,
  ///     or its norms not those of the guard's SpikeOptions. Nothing was changed.
  void load_state(const StepGuardState& state);

 private:
  friend class StepLog;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Stores the state, for torch::save.
FASTAMP_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        StepGuard& guard);
/// Reads it, for torch::load.
/// @throws c10::Error if the archive is not one of a guard.
FASTAMP_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       StepGuard& guard);

}  // namespace fastamp
