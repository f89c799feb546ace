#pragma once

#include "scaler/scale_state.h"
#include "scaler/step_notes.h"

#include <fastamp/optim/step_gate.h>
#include <fastamp/scaler/grad_scaler.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace fastamp {

/// The parts of GradScaler: scale and options here, unscaling and stepping in optimizer_steps.cpp,
/// clipping in clipping.cpp.
struct GradScaler::Impl {
  explicit Impl(const GradScalerOptions& given);

  void expect_scale(const char* function) const;
  /// @throws c10::ValueError for rules that the constructor refuses.
  void set_rules(const char* function, const scaler::ScaleRules& rules);

  /// The record of an optimizer. One of another optimizer, which lived at its address, is set aside
  /// until the iteration ends.
  scaler::OptimizerRecord& record_of(const torch::optim::Optimizer& optimizer);
  // Looks without inserting, so that a refused call leaves no entry behind.
  scaler::Stage stage_of(const torch::optim::Optimizer& optimizer) const;

  /// Whether all gradients are others than those of the record's pass, and scale() was called
  /// since: then a new backward pass has made them, and they are scaled.
  bool scaled_anew(const torch::optim::Optimizer& optimizer,
                   const scaler::OptimizerRecord& record) const;
  /// Refuses an optimizer whose gradients were unscaled and are scaled anew. What was put off to
  /// the step for gradients that are gone is forgotten.
  void check_iteration(const char* function, const torch::optim::Optimizer& optimizer);

  /// The gradients as they are now. With allow_fp16 false, fp16 ones are refused.
  static std::vector<scaler::DeviceGradients> gather(torch::optim::Optimizer& optimizer,
                                                     scaler::OptimizerRecord& record,
                                                     bool allow_fp16, scaler::Use use);
  void unscale(torch::optim::Optimizer& optimizer, scaler::OptimizerRecord& record);
  /// Raises the flags of a new pass if another rank has raised one, where that is asked for.
  void agree(const scaler::PassResult& pass, scaler::OptimizerRecord& record) const;
  /// Checks scaled gradients without writing them, unless that was done and still holds.
  /// @returns The pass, the record's, or null if they are, or have to be, unscaled in place.
  const scaler::PassResult* check(torch::optim::Optimizer& optimizer,
                                  scaler::OptimizerRecord& record, std::optional<double> max_norm);
  /// Whether a step of this optimizer goes through a gate; fuses it first if that is asked for.
  bool takes_gate(torch::optim::Optimizer& optimizer);
  /// Whether clipping may be put off to the step: a sparse gradient is stepped as a dense copy.
  bool folds(torch::optim::Optimizer& optimizer);
  void step_through_gate(torch::optim::Optimizer& optimizer, scaler::OptimizerRecord& record,
                         std::optional<at::Tensor>& result);
  std::optional<at::Tensor> step_if_finite(torch::optim::Optimizer& optimizer,
                                           scaler::OptimizerRecord& record);
  /// Does at once what was put off to the step: unscales, clips by norm, clips by value.
  void clip_now(torch::optim::Optimizer& optimizer, scaler::OptimizerRecord& record);
  scaler::OptimizerRecord& begin_clipping(const char* function, torch::optim::Optimizer& optimizer);
  static at::Tensor norm_of(const std::vector<scaler::DeviceGradients>& gradients,
                            const scaler::OptimizerRecord* record, double norm_type);

  /// Ends the iteration, by the rules or with a scale of the caller's. Without an outcome there was
  /// none: then a new scale is all that changes.
  void update(const at::Tensor& new_scale = {});
  /// The records of this iteration's optimizers, in the order in which they were unscaled or
  /// checked first.
  std::vector<scaler::RecordPointer> records_in_use() const;
  /// What these optimizers did.
  std::vector<scaler::Outcome> outcomes() const;
  void finish_iteration(const std::vector<scaler::Outcome>& outcomes);
  /// The norm over all optimizers of this iteration; undefined if one's is not known.
  at::Tensor iteration_norm() const;

  GradScalerOptions options;
  bool enabled;
  scaler::ScaleState state;
  scaler::StepNotes notes;
  /// By the address of the optimizer; of one that is gone, until the iteration ends, by its own.
  /// Only to be looked up in: the order of addresses means nothing.
  std::unordered_map<const void*, scaler::RecordPointer> records;
  /// While a CUDA graph is captured nothing is read back; each replay has these to read.
  bool capturing = false;
  std::vector<scaler::Outcome> captured;
  std::uint64_t passes = 0;  ///< Made so far.
};

}  // namespace fastamp
