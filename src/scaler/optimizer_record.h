// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_pass.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace fastamp::scaler {

/// Handle that a front end keeps of an optimizer so as to know it again; it does not keep it alive.
class OptimizerHandle {
 public:
  OptimizerHandle() = default;
  OptimizerHandle(const OptimizerHandle&) = delete;
  OptimizerHandle& operator=(const OptimizerHandle&) = delete;
  virtual ~OptimizerHandle() = default;

  /// Whether the optimizer has been destroyed, as far as that is known.
  virtual bool is_gone() const = 0;
};

/// Stages that an optimizer has come to in an iteration.
enum class Stage : std::uint8_t { kReady, kUnscaled, kStepped };

/// Progress: how far an optimizer has come, and what was found. Python's front end of scalers reads
/// it from torch's `_per_optimizer_states` before each call of the core and writes it there
/// afterwards.
struct Progress {
  Stage stage = Stage::kReady;
  std::vector<at::Tensor> flags;  ///< fp32, one for each device: non-zero after an overflow.
};

using Counts = std::vector<std::shared_ptr<const NonFiniteCounts>>;

/// Record of what a scaler knows about one optimizer: some of it from step to step, the rest for
/// one iteration. It keeps gradients alive until the step, parameters not.
struct FASTAMP_API OptimizerRecord {
  std::unique_ptr<OptimizerHandle> handle;
  PassBuffers buffers;
  GradientRanges ranges;
  bool skipped = false;  ///< Whether its last step was.

  Progress progress;
  std::shared_ptr<PassResult> pass;  ///< This iteration's last pass over its gradients.
  std::uint64_t times_scaled = 0;    ///< How often scale() had been called at the pass.
  std::uint64_t first_pass = 0;      ///< The number of the iteration's first pass, from 1; 0: none.
  at::Tensor inv_scale;              ///< Of a pass that left the gradients scaled; else undefined.
  bool shares_gradients = false;     ///< Gathered::shared of the gradients gathered last.
  bool has_foreign = false;          ///< There were gradients that the pass did not see,
  Counts foreign_counts;             ///< and where their inf and NaN were counted.
  at::Tensor norm_factor;            ///< The pass's norm has to be multiplied by it; undefined: 1.
  at::Tensor norm;       ///< 2-norm of the unscaled gradients, if clipping has asked for it.
  at::Tensor clip_coef;  ///< Put off to the step, as clip_value is.
  std::optional<double> clip_value;
  /// Flags of passes that ScalerCore::end_pass() has ended in this iteration: raised where one of
  /// them overflowed, and where that one's inf and NaN were counted.
  std::vector<at::Tensor> earlier_flags;
  Counts earlier_counts;
  /// unscale_() has divided the gradients, and ended with an error before it had applied the clips
  /// that were put off: called again, it applies them.
  bool clips_due = false;

  bool clips_at_step() const { return clip_coef.defined() || clip_value.has_value(); }

  /// Drops what belongs to one iteration.
  /// @returns What holds the iteration's gradients, for the caller to destroy last: their end may
  ///     run code that uses the record.
  std::shared_ptr<PassResult> start_iteration();

  /// The norm of this iteration's unscaled gradients if a pass has summed it; else undefined.
  at::Tensor known_norm();

  /// Counters where the inf and NaN of this iteration's gradients were counted.
  Counts counts() const;
};

using RecordPointer = std::shared_ptr<OptimizerRecord>;

}  // namespace fastamp::scaler
