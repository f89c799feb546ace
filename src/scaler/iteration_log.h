// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/optimizer_record.h"
#include "scaler/readback.h"

#include <fastamp/macros.h>
#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastamp::scaler {

/// Outcome of one optimizer in one iteration.
struct Outcome {
  RecordPointer record;
  std::vector<at::Tensor> flags;  ///< The non-finite flag of each device.
  Counts counts;
};

/// A step that was skipped.
struct Skip {
  StepRecord row;  ///< Of its iteration.
  RecordPointer optimizer;
};

/// Inf and NaN of one gradient.
struct NonFiniteElements {
  std::int64_t inf = 0;
  std::int64_t nan = 0;
};

/// Counts by the position of the parameter; those that are finite are left out.
using NonFiniteByPosition = std::map<std::size_t, NonFiniteElements>;

/// Reads counters. sync: waits for the device.
FASTAMP_API NonFiniteByPosition read_counts(const Counts& counts);

/// Log: what the host knows of past iterations, at most a few behind the device. Not thread-safe.
class FASTAMP_API IterationLog {
 public:
  /// An iteration with non-finite gradients.
  struct Overflow {
    std::int64_t step = 0;
    double scale = 0.0;  ///< That it used.
    std::vector<std::pair<RecordPointer, Counts>> optimizers;
  };

  /// @param iterations, skipped_in_a_row  Of the past that a checkpoint has.
  explicit IterationLog(double scale, std::int64_t iterations = 0,
                        std::int64_t skipped_in_a_row = 0)
      : iterations_(iterations), scale_(scale), skipped_in_a_row_(skipped_in_a_row) {}

  /// An iteration whose end is still to come.
  struct Iteration {
    std::vector<Outcome> outcomes;
    bool notifies;
    Readback readback;
    std::int64_t number = 0;
  };
  using Iterations = std::list<Iteration>;

  /// Makes all that expect() needs, before the iteration ends. Without an outcome it is none, and
  /// only the scale will be new.
  /// @param notifies  take_skips() returns its skips.
  /// @param ring_row     Where the iteration's will be, as kernels::ScaleHistory lays it out, for
  ///     that; may be undefined.
  static Iterations prepare(const at::Tensor& scale, std::vector<Outcome> outcomes,
                            bool notifies = false, const at::Tensor& ring_row = {});
  /// Starts reading back what the iteration did. Needs no memory.
  void expect(Iterations prepared);
  /// Takes in the iterations whose values have arrived, or waits for all of them. What it throws
  /// leaves those that are not taken in for the next call.
  void poll(bool wait);
  /// Polls for a caller who has done what cannot be undone: what there is no memory for is left
  /// to the next poll.
  void poll_if_possible(bool wait);

  std::int64_t iterations() const { return iterations_; }
  double scale() const { return scale_; }
  bool skipped() const { return skipped_; }
  std::int64_t skipped_in_a_row() const { return skipped_in_a_row_; }
  /// The last iteration with an overflow, if there was one.
  const std::optional<Overflow>& overflow() const { return overflow_; }

  /// Returns, once, the skips that are known since the last call.
  std::list<Skip> take_skips() { return std::exchange(skips_, {}); }

  bool has_warning() const { return warning_.has_value(); }
  /// Returns, once, what the user is to be warned of: a sentence without its full stop.
  std::optional<std::string> take_warning() { return std::exchange(warning_, std::nullopt); }

 private:
  void take_in(const Iteration& iteration);
  std::optional<std::string> warning_due(double before, double after, std::int64_t skipped) const;

  Iterations pending_;
  std::int64_t iterations_;
  double scale_;
  bool skipped_ = false;
  std::int64_t skipped_in_a_row_;
  bool warned_ = false;
  bool warned_of_inverse_ = false;
  std::optional<std::string> warning_;
  std::optional<Overflow> overflow_;
  std::list<Skip> skips_;
};

}  // namespace fastamp::scaler
