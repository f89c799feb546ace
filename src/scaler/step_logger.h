// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/iteration_log.h"
#include "scaler/readback.h"
#include "trace/recorder.h"

#include <fastamp/macros.h>
#include <fastamp/scaler/log_to.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace fastamp::scaler {

/// Rows of iterations on their way from the device to somebody who logs them. Not thread-safe.
class FASTAMP_API StepLogger {
 public:
  /// @param casts  Count casts from now on.
  StepLogger(LogCallback callback, bool casts);
  ~StepLogger();
  StepLogger(const StepLogger&) = delete;
  StepLogger& operator=(const StepLogger&) = delete;

  /// Starts reading back what an iteration did. Runs no code of users.
  /// @param ring_row  Of the iteration, as kernels::ScaleHistory lays it out.
  void expect(std::int64_t step, const at::Tensor& ring_row, const std::vector<Outcome>& outcomes);
  /// Calls the callback with the rows that have arrived, or waits for all of them. What it throws
  /// leaves the rows that come after as they are.
  void pass_on(bool wait);
  /// Passes on all rows and forgets the callback.
  void release();
  /// Ends it without the rows that have not been passed on.
  void drop();
  bool is_released() const { return callback_ == nullptr; }

 private:
  struct Pending {
    std::int64_t step;
    std::vector<std::size_t> flags;   ///< How many each optimizer has,
    std::vector<std::size_t> counts;  ///< and counters of inf and NaN.
    bool counts_zeros;
    CastCounts casts;
    Readback readback;
  };

  static LoggedStep row_of(Pending& pending);
  CastCounts casts_since_last();

  std::shared_ptr<const LogCallback> callback_;
  std::shared_ptr<autocast::Recorder> recorder_;  ///< Null: casts are not counted.
  CastCounts counted_;                            ///< By the recorder, up to the last iteration.
  std::deque<Pending> pending_;
  bool passing_on_ = false;
};

}  // namespace fastamp::scaler
