// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/iteration_log.h"
#include "scaler/optimizer_port.h"
#include "scaler/scale_ops.h"
#include "scaler/scale_sidecar.h"
#include "scaler/skip_hooks.h"

#include <fastamp/export.h>
#include <fastamp/scaler/agreement.h>
#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastamp::scaler {

class StepLogger;

/// What a call on a scaler lends to the core, which owns neither the scale nor the options.
struct ScalerCall {
  const at::Tensor& scale;
  std::uint64_t times_scaled = 0;            ///< How often scale() has been called.
  c10::DeviceType device = c10::kCUDA;       ///< The scaler's kind of device.
  const FlagAgreement* agreement = nullptr;  ///< Null: no communication.
};

/// Makes flags the same on all ranks: raised where one rank has raised one. A rank without
/// gradients gets a flag, so that it takes part.
FASTAMP_API void agree_on(std::vector<at::Tensor>& flags, const ScalerCall& call);

/// The iterations of a gradient scaler, for any kind of optimizer: what is checked when, what is
/// put off to the step, what an iteration's end leaves behind. The scale, its rules and the API
/// belong to the scaler of each language. Not thread-safe.
///
/// An optimizer's gradients are checked once in an iteration. They are unscaled in place by then,
/// or, where the optimizer takes a gate and nobody asked to see them, left as they are until its
/// step, which unscales, clips and updates in one pass and is skipped on the device.
class FASTAMP_API ScalerCore {
 public:
  /// @param history_size  Iterations that history() keeps; 0: none.
  ScalerCore(double init_scale, std::int64_t history_size);
  /// Uses, and adds to, the records of another one: a scaler that only warms up for that.
  ScalerCore(double init_scale, const ScalerCore& other);

  ScaleSidecar& sidecar() { return sidecar_; }
  const ScaleSidecar& sidecar() const { return sidecar_; }
  IterationLog& log() { return log_; }
  const IterationLog& log() const { return log_; }

  /// Tells of each iteration that ends from now on, until the logger is released.
  /// @throws c10::ValueError if history_size is 0.
  void log_to(std::shared_ptr<StepLogger> logger);
  bool is_logged() const { return !loggers_.empty(); }
  SkipHooks& skip_hooks() { return skip_hooks_; }
  /// Gives loggers the rows that have arrived, and hooks the skips. That runs code of users, so the
  /// iteration has to be over for the caller, too.
  void pass_rows_on();

  /// Goes on from a checkpoint. What was known of earlier iterations is destroyed last.
  void load(double scale, std::vector<StepRecord> history, std::int64_t skipped_in_a_row);

  // -- records

  /// The record of an optimizer, a new one if it has none.
  RecordPointer record_of(OptimizerPort& port);
  /// The same, or null; nothing is inserted.
  RecordPointer find(const OptimizerPort& port) const;
  RecordPointer find(std::intptr_t key) const;
  /// How many there are.
  std::size_t optimizers() const { return records_->size(); }
  /// Those whose gradients were counted at the step that was counted last; empty if none was.
  std::vector<RecordPointer> records_counted_last() const;
  /// Makes room at the address of an optimizer that is gone.
  /// @returns The key that its record has until the iteration ends; no optimizer's.
  std::intptr_t set_aside(std::intptr_t key);

  // -- an iteration of one optimizer

  /// Whether all gradients are others than those of the last pass, and scale() was called since:
  /// then a new backward pass has made them, and they are scaled.
  static bool scaled_anew(const OptimizerPort& port, const OptimizerRecord& record,
                          const ScalerCall& call);
  /// Forgets what was put off to the step for gradients that are gone: the iteration was broken
  /// off. Only for an optimizer that is not unscaled yet.
  static void forget_if_scaled_anew(const OptimizerPort& port, OptimizerRecord& record,
                                    const ScalerCall& call);

  /// Unscales in place. Clips that were put off are left to apply_clips().
  /// @returns Whether it did; if not, because some gradients are foreign, nothing was done.
  bool unscale(OptimizerPort& port, const ScalerCall& call);
  /// Checks scaled gradients without writing them, unless that was done and still holds.
  /// @param max_norm  Compute the coefficient of a clip by this norm.
  /// @returns The record's pass; null if the gradients are, or have to be, unscaled in place.
  const PassResult* check(OptimizerPort& port, const RecordPointer& record, const ScalerCall& call,
                          std::optional<double> max_norm);
  /// Notes a pass that the caller has made; its predecessor is destroyed last.
  void note_pass(OptimizerRecord& record, std::shared_ptr<PassResult> pass, const ScalerCall& call);

  /// Does at once what was put off to the step: unscales, clips by norm, clips by value.
  static void clip_now(OptimizerPort& port, const RecordPointer& record);
  /// The same for gradients that are unscaled.
  static void apply_clips(OptimizerPort& port, const RecordPointer& record);

  struct NormClip {
    double max_norm = 0.0;
    double norm_type = 2.0;
    bool error_if_nonfinite = false;
    /// Computes the norm of gradients that are unscaled, of those on other ranks too; null: the
    /// norm is that of the optimizer's own gradients.
    std::function<at::Tensor()> norm_over_ranks = nullptr;
  };
  /// Clips gradients that are unscaled, or puts it off to the step.
  /// @param may_put_off  The optimizer takes a gate.
  /// @param flags  Of the step that is to come: raised if the factor is inf or NaN.
  /// @returns The norm before clipping; undefined if there are no gradients.
  static at::Tensor clip_unscaled(OptimizerPort& port, OptimizerRecord& record,
                                  const NormClip& clip, bool may_put_off,
                                  std::vector<at::Tensor> flags);
  /// Clips by the norm, or puts that off to the step. Gradients that are unscaled for it are those
  /// of optimizers that take no gate.
  at::Tensor clip_norm(OptimizerPort& port, const ScalerCall& call, const NormClip& clip,
                       bool may_put_off);
  /// Clips by value, after a clip by norm that was put off.
  void clip_value(OptimizerPort& port, const ScalerCall& call, double clip_value, bool may_put_off);

  /// Steps an optimizer that takes a gate. Its step is called whatever the gradients are.
  /// @returns Whether it was; false: there are no gradients, and nothing was done.
  bool step(OptimizerPort& port, const ScalerCall& call, bool keep_scaled_grads);

  // -- the end of an iteration

  /// What the optimizers with a pass did, in the order of their first one.
  std::vector<RecordPointer> records_in_use() const;
  /// Ends an iteration: moves the scale by the rules or to a scale of the caller's, writes history,
  /// starts reading back. Without an outcome there was none, and new_scale is all that changes.
  /// @param capturing  A CUDA graph is being captured: nothing is read back, take_captured() has
  ///     what each replay will leave.
  void end_iteration(ScaleTensors& tensors, const ScaleRules& rules,
                     const std::vector<Outcome>& outcomes, const at::Tensor& new_scale,
                     bool capturing);
  std::vector<Outcome> take_captured() { return std::exchange(captured_, {}); }
  /// Takes note of a replay: versions that it moved, its outcome.
  void note_replay(const ScaleTensors& tensors, const std::vector<Outcome>& captured);

 private:
  using Records = std::unordered_map<std::intptr_t, RecordPointer>;

  PassOptions options_for(OptimizerRecord& record) const;
  at::Tensor inverse_for(OptimizerRecord& record, const at::Tensor& scale) const;
  void start_iteration();
  void note_outcomes(const at::Tensor& scale, const std::vector<Outcome>& outcomes);

  std::shared_ptr<Records> records_;
  ScaleSidecar sidecar_;
  IterationLog log_;
  std::vector<Outcome> captured_;
  std::vector<std::shared_ptr<StepLogger>> loggers_;
  SkipHooks skip_hooks_;
  std::uint64_t passes_ = 0;  ///< Made so far.
};

}  // namespace fastamp::scaler
