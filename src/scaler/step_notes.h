#pragma once

#include "scaler/gradient_pass.h"
#include "scaler/readback.h"

#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastamp::scaler {

enum class Stage : std::uint8_t { kReady, kUnscaled, kStepped };

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// What a scaler keeps about one optimizer: some of it from step to step, the rest for one
/// iteration. It keeps gradients alive until the iteration's end, parameters not.
struct OptimizerRecord {
  PassMemory memory;
  std::vector<WeakTensor> parameters;
  bool skipped = false;

  Stage stage = Stage::kReady;
  std::optional<PassResult> pass;
  std::uint64_t times_scaled = 0;  ///< ScaleState::times_scaled() at the pass.
  std::uint64_t first_pass = 0;    ///< The number of the iteration's first pass, from 1; 0: none.
  bool read_only = false;          ///< The pass left the gradients scaled.
  /// Two parameters have one gradient: a step that writes gradients would write it twice.
  bool shares_gradients = false;
  at::Tensor agreed_flag;  ///< What ranks agreed on, on a rank whose pass saw no gradient.
  at::Tensor norm;         ///< 2-norm of the unscaled gradients, if clipping has asked for it.
  at::Tensor clip_coef;    ///< Put off to the step, as clip_value is.
  std::optional<double> clip_value;

  /// Whether this may be the record of an optimizer: false if it has none of the parameters.
  bool recognises(const torch::optim::Optimizer& optimizer) const;
  /// Whether all of the optimizer's parameters are gone, and with them the optimizer.
  bool is_orphaned() const;
  /// Returns what holds the iteration's gradients, for the caller to let go: their end may run code
  /// that uses the record.
  std::optional<PassResult> start_iteration();
  /// The step was made or skipped; lets its gradients go.
  void end_step();
  /// The flags of the devices that hold gradients.
  std::vector<at::Tensor> flags() const;
  /// The norm of this iteration's gradients if a pass has summed it; else undefined.
  at::Tensor known_norm() const;
};

using RecordPointer = std::shared_ptr<OptimizerRecord>;
using Counts = std::vector<std::shared_ptr<const NonFiniteCounts>>;

/// What one optimizer did in one iteration.
struct Outcome {
  RecordPointer record;
  std::vector<at::Tensor> flags;
  Counts counts;
};

/// What the host knows of past iterations, at most a few behind the device. Not thread-safe.
class StepNotes {
 public:
  explicit StepNotes(double scale) : scale_(scale) {}
  /// Goes on from what a checkpoint tells of past iterations.
  StepNotes(double scale, std::int64_t iterations, std::int64_t skipped_in_a_row,
            OverflowReport report)
      : iterations_(iterations),
        scale_(scale),
        skipped_in_a_row_(skipped_in_a_row),
        loaded_report_(std::move(report)) {}

  /// Starts reading back what an iteration did. Takes in what has arrived of earlier ones. Without
  /// an outcome it was none, and only the scale is new.
  void expect(const at::Tensor& scale, const std::vector<Outcome>& outcomes);
  /// Takes in the iterations whose values have arrived, or waits for all of them.
  void settle(bool wait);

  double scale() const { return scale_; }
  bool skipped() const { return skipped_; }
  std::int64_t skipped_in_a_row() const { return skipped_in_a_row_; }
  void set_scale(double scale) { scale_ = scale; }
  /// Reads the counters of the last skipped iteration. Waits for the device.
  OverflowReport report(const std::unordered_map<const void*, std::string>& names) const;

 private:
  struct Iteration {
    std::int64_t number;
    std::vector<Outcome> outcomes;
    Readback readback;
  };
  struct Overflow {
    std::int64_t number = -1;
    double scale = 0.0;
    std::vector<std::pair<RecordPointer, Counts>> optimizers;
  };

  void take_in(Iteration& iteration);
  void warn(double before);

  std::deque<Iteration> pending_;
  std::int64_t iterations_ = 0;
  double scale_;
  bool skipped_ = false;
  std::int64_t skipped_in_a_row_ = 0;
  bool warned_ = false;
  Overflow overflow_;
  OverflowReport loaded_report_;  ///< Until the next overflow.
};

}  // namespace fastamp::scaler
