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
#include <list>
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

  /// A row on its way.
  struct Pending {
    std::int64_t step;
    std::vector<std::size_t> flags;   ///< How many each optimizer has,
    std::vector<std::size_t> counts;  ///< and counters of inf and NaN.
    bool counts_zeros;
    at::Tensor ring_row;      ///< As kernels::ScaleHistory lays it out,
    at::Tensor ring_numbers;  ///< and where it goes, among the numbers that are read back.
    Readback readback;
    CastCounts casts = {};
  };
  using Rows = std::list<Pending>;

  /// Makes all that expect() needs, before the iteration ends. Runs no code of users.
  /// @param ring_row  Where the iteration's will be.
  static Rows prepare(std::int64_t step, const at::Tensor& ring_row,
                      const std::vector<Outcome>& outcomes);
  /// Starts reading back what the iteration did. Needs no memory.
  void expect(Rows prepared);
  /// Calls the callback with the rows that have arrived, or waits for all of them. What it throws
  /// leaves the rows that come after as they are.
  void pass_on(bool wait);
  /// Passes on all rows and forgets the callback.
  void release();
  /// Ends it without the rows that have not been passed on.
  void drop();
  bool is_released() const { return callback_ == nullptr; }

 private:
  static LoggedStep row_of(Pending& pending);
  CastCounts casts_since_last();

  std::shared_ptr<const LogCallback> callback_;
  std::shared_ptr<autocast::Recorder> recorder_;  ///< Null: casts are not counted.
  CastCounts counted_;                            ///< By the recorder, up to the last iteration.
  Rows pending_;
  bool passing_on_ = false;
};

}  // namespace fastamp::scaler
