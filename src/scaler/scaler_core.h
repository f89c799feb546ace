// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"
#include "scaler/iteration_log.h"
#include "scaler/optimizer_record.h"
#include "scaler/scale_ops.h"
#include "scaler/skip_hooks.h"
#include "scaler/spike_rule.h"
#include "scaler/step_logger.h"

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step.h>
#include <fastamp/scaler/agreement.h>
#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastamp::scaler {

class StepLogger;

/// Arguments of a call that a scaler hands to the core, which owns neither scale nor options.
struct ScalerCall {
  const at::Tensor& scale;
  std::uint64_t times_scaled = 0;            ///< How often scale() has been called.
  c10::DeviceType device = c10::kCUDA;       ///< The scaler's kind of device.
  const FlagAgreement* agreement = nullptr;  ///< Null: no communication.
  /// The flag of an earlier pass for which is_spare_flag() is true, to be overwritten; undefined:
  /// none.
  at::Tensor spare_flag = {};
  /// The core keeps the flag of each pass for the next one itself. Not of scalers of Python, whose
  /// tensors are made anew for a flag that anybody else holds.
  bool keeps_flag = false;
};

/// Makes flags the same on all ranks: raised where one rank has raised one. A rank without
/// gradients gets a flag, so that it takes part.
FASTAMP_API void agree_on(std::vector<at::Tensor>& flags, const ScalerCall& call);

/// No gradient was checked: torch's scaler refuses that with an AssertionError.
class FASTAMP_API NoGradients : public c10::Error {
 public:
  explicit NoGradients(std::string what);
};

/// Refuses a call that comes out of order. Called by the front ends before they look at gradients.
/// @param function  "unscale_", "pass_", "step", "clip_grad_norm_" or "clip_grad_value_".
/// @param stage     Of the optimizer that it is called for.
/// @throws c10::Error
FASTAMP_API void check_order(std::string_view function, Stage stage);

/// Refuses to step an optimizer none of whose parameters has a gradient.
/// @throws NoGradients
[[noreturn]] FASTAMP_API void refuse_no_gradients();

/// Reasons that a step without a scale is skipped for, besides gradients that are not finite.
struct SkipReasons {
  std::vector<at::Tensor> not_finite;  ///< One of these one-element tensors is inf or NaN.
  SpikeRule* spike = nullptr;          ///< Its judgement of the norm; null: none.
  at::Tensor norm;                     ///< For that; undefined: of the pass.
};

/// Clipping by a norm.
struct NormClip {
  double max_norm = 0.0;
  double norm_type = 2.0;
  bool error_if_nonfinite = false;
};

/// Answer: what a front end has to do about a clip.
enum class ClipNext : std::uint8_t {
  kNothing,          ///< The step clips.
  kApply,            ///< Unscale the gradients, unless that was done, and apply the clips.
  kApplyThenRepeat,  ///< The same, and then the call again: another clip comes before it.
};

/// Arguments of the end of an iteration.
struct IterationEnd {
  ScaleTensors tensors;
  ScaleRules rules;
  std::vector<Outcome> outcomes;  ///< Of each optimizer with flags. Without any there was none,
  at::Tensor new_scale;           ///< and this is all that changes; undefined: the rules decide.
  /// A CUDA graph is being captured: nothing is read back, take_captured() has what each replay
  /// will leave.
  bool capturing = false;
};

/// The iterations of a gradient scaler, for any kind of optimizer: what is checked when, what is
/// put off to the step, what an iteration's end leaves behind. The scale, its rules and the API
/// belong to the scaler of each language, its front end. Not thread-safe.
///
/// The front end gathers gradients and hands them over; the core works on them, or says what is to
/// be done; the front end does it. The core calls back only to let ranks agree, and to multiply
/// gradients of Python's tensor subclasses.
///
/// An optimizer's gradients are checked once in an iteration. They are unscaled in place by then,
/// or, where the optimizer takes an AmpStep and nobody asked to see them, left as they are until
/// its step, which unscales, clips and updates in one pass and is skipped on the device.
class FASTAMP_API ScalerCore {
 public:
  /// @param history_size  Iterations that history() keeps; 0: none.
  ScalerCore(double init_scale, std::int64_t history_size);
  /// Uses, and adds to, the records of another one: a scaler that only warms up for that.
  ScalerCore(double init_scale, const ScalerCore& other);

  ScaleHistory& scale_history() { return scale_history_; }
  const ScaleHistory& scale_history() const { return scale_history_; }
  IterationLog& log() { return log_; }
  const IterationLog& log() const { return log_; }

  /// Reports each iteration that ends from now on, until the logger is released.
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

  /// The record that was added under a key, null if there is none. A key is the address of an
  /// optimizer: whether it is still the same one, the front end asks the record's handle.
  RecordPointer find(std::intptr_t key) const;
  RecordPointer add(std::intptr_t key, std::unique_ptr<OptimizerHandle> handle);
  /// Returns how many there are.
  std::size_t optimizers() const { return records_->size(); }
  /// Returns those whose gradients were counted at the last such step; empty if none was.
  std::vector<RecordPointer> records_counted_last() const;
  /// Makes room at the address of an optimizer that is gone.
  /// @returns The key that its record has until the iteration ends; no optimizer's.
  std::intptr_t set_aside(std::intptr_t key);

  // -- an iteration of one optimizer

  /// Whether scale() was called since the last pass over the gradients, so that a backward pass may
  /// have made others. If all of them are others than those of the pass, they are scaled, and the
  /// iteration was broken off: record.start_iteration() forgets what was put off to the step.
  /// @param times_scaled  How often scale() has been called.
  static bool may_be_scaled_anew(const OptimizerRecord& record, std::uint64_t times_scaled);

  /// Unscales gradients in place. Clips that were put off are left to the front end.
  /// @param gathered  For Purpose::kUnscale, without foreign ones, right before: no code of users
  ///     has run since.
  void unscale(OptimizerRecord& record, Gathered gathered, const ScalerCall& call);
  /// Checks scaled gradients without writing them, unless that was done and still holds.
  /// @param gathered  For Purpose::kCheck, right before.
  /// @param max_norm  Compute the coefficient of a clip by this norm.
  /// @returns Whether the gradients stay scaled until the step, and record.pass lists them as they
  ///     were gathered; if not, nothing was done and they
  ///     have to be unscaled in place. nullopt: those of an earlier pass were let go, which may
  ///     have run code, so that they have to be gathered again; not if there is no earlier pass.
  std::optional<bool> check(OptimizerRecord& record, Gathered gathered, const ScalerCall& call,
                            std::optional<double> max_norm = std::nullopt);
  /// Notes a pass that the caller has made; its predecessor is destroyed last.
  void note_pass(OptimizerRecord& record, std::shared_ptr<PassResult> pass, const ScalerCall& call);

  /// Clips by the 2-norm at the step, of gradients that stay scaled until then.
  /// @param record    Without an earlier pass.
  /// @param gathered  As for check().
  /// @returns The norm, undefined if there are no gradients; nullopt if they have to be unscaled
  ///     first, for clip_norm().
  std::optional<at::Tensor> clip_norm_at_step(OptimizerRecord& record, Gathered gathered,
                                              const NormClip& clip, const ScalerCall& call);
  /// The 2-norm of unscaled gradients; undefined if only the front end's framework can compute it.
  /// @param gathered  For Purpose::kNorm.
  /// @param dtype     Of the norm.
  static at::Tensor two_norm(const OptimizerRecord& record, const Gathered& gathered,
                             at::ScalarType dtype);
  /// Clips unscaled gradients by their norm, or puts it off to the step.
  /// @param gathered  For Purpose::kNorm.
  /// @param norm      Of them, of those on other ranks too if that is wanted; undefined if there
  ///     are none, which is looked at for ranks to refuse together.
  /// @param at_step   The optimizer takes an AmpStep.
  /// @param call      Null: of a disabled scaler, which agrees with nobody.
  static void clip_norm(OptimizerRecord& record, const Gathered& gathered, const at::Tensor& norm,
                        const NormClip& clip, bool at_step, const ScalerCall* call);
  /// Clips by value, after a clip by norm that was put off.
  /// @param gathered  As for check(); none if gradients must not stay scaled.
  /// @param at_step   The optimizer takes an AmpStep.
  ClipNext clip_value(OptimizerRecord& record, std::optional<Gathered> gathered, double clip_value,
                      bool at_step, const ScalerCall& call);
  static void multiply(const Gathered& gathered, const at::Tensor& factor);

  /// Ends a pass whose gradients the program uses by itself before it makes others for the step of
  /// the same iteration. Where it overflowed they become 0, and the step will be skipped.
  /// @param record    Its gradients are unscaled.
  /// @param gathered  For Purpose::kMultiply; foreign ones are left to the front end.
  static void end_pass(OptimizerRecord& record, const Gathered& gathered);

  /// Returns what an optimizer that takes an AmpStep is stepped with, whatever its gradients are.
  /// They have been checked or unscaled.
  /// @param was_ready  Nothing was done with the optimizer before this step: if it is refused, that
  ///     leaves no trace.
  /// @throws NoGradients
  static optim::AmpStep begin_step(OptimizerRecord& record, bool was_ready, bool keep_scaled_grads);
  /// Does so where gradients carry no scale (ScalerCall::scale is 1, without an agreement until
  /// here): decides on the skip.
  /// @param call  With the agreement.
  /// @returns An AmpStep without factors or flag if there are no gradients, here or on other ranks.
  static optim::AmpStep begin_unscaled_step(OptimizerRecord& record, const SkipReasons& reasons,
                                            const ScalerCall& call);
  /// Lets the gradients go, of an optimizer that was stepped.
  static void end_step(OptimizerRecord& record) noexcept;

  // -- the end of an iteration

  /// Returns what the optimizers with a pass did, in the order of their first one.
  std::vector<RecordPointer> records_in_use() const;
  /// Ends an iteration: moves the scale, writes history, starts reading back.
  /// @throws NoGradients  There are neither outcomes nor a new scale.
  void end_iteration(IterationEnd end);
  /// Ends it in two parts, for a step in between that must not be made if the iteration could not
  /// be ended: all that can fail but for moving the scale, and the rest.
  class PreparedEnd;
  PreparedEnd prepare_end(IterationEnd end);
  /// Prepares the end of a guarded step, whose scale of 1 stays: it counts clean iterations.
  /// @returns Nothing for a step without gradients.
  std::optional<PreparedEnd> prepare_unscaled_end(const ScaleTensors& one, RecordPointer record,
                                                  bool capturing);
  void end_iteration(PreparedEnd prepared);
  std::vector<Outcome> take_captured() { return std::exchange(captured_, {}); }
  /// Takes note of a replay: versions that it moved, its outcome.
  void note_replay(const ScaleTensors& tensors, const std::vector<Outcome>& captured);

 private:
  using Records = std::unordered_map<std::intptr_t, RecordPointer>;

  PassOptions options_for(OptimizerRecord& record) const;
  at::Tensor inverse_for(OptimizerRecord& record, const at::Tensor& scale,
                         Gathered& gathered) const;
  /// Notes of an iteration that ends.
  struct PreparedOutcomes {
    IterationLog::Iterations iteration;
    std::vector<StepLogger::Rows> rows;  ///< For each logger; none without a row of the history.
  };
  /// All records, and room for the passes of the iteration that ends.
  struct Passed {
    std::vector<RecordPointer> records;
    std::vector<std::shared_ptr<PassResult>> passes;
  };

  Passed prepare_passed() const;
  void start_iteration(Passed passed);
  PreparedOutcomes prepare_outcomes(const at::Tensor& scale, std::vector<Outcome> outcomes) const;
  void note_outcomes(PreparedOutcomes prepared);

  std::shared_ptr<Records> records_;
  ScaleHistory scale_history_;
  IterationLog log_;
  std::vector<Outcome> captured_;
  std::vector<std::shared_ptr<StepLogger>> loggers_;
  SkipHooks skip_hooks_;
  std::uint64_t passes_ = 0;  ///< Made so far.
};

/// Result of prepare_end().
class ScalerCore::PreparedEnd {
  friend class ScalerCore;

  IterationEnd end_;  ///< Its outcomes are in to_note_, unless they are captured.
  bool has_outcomes_ = false;
  std::vector<at::Tensor> flags_;
  at::Tensor norm_;  ///< May be undefined.
  PreparedOutcomes to_note_;
  Passed passed_;
};

}  // namespace fastamp::scaler
