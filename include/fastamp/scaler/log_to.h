// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/trace.h>
#include <fastamp/macros.h>
#include <fastamp/scaler/grad_scaler.h>
#include <fastamp/scaler/reports.h>
#include <fastamp/scaler/step_guard.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>

namespace fastamp {

namespace scaler {
class StepLogger;
}

/// Row of a log: what is known of an iteration.
struct LoggedStep : StepRecord {
  int64_t overflows = 0;              ///< Gradient elements that were inf or NaN.
  std::optional<int64_t> underflows;  ///< Gradient elements that were 0; empty where they were not
                                      ///< counted: underflow_report() says when they are.
  CastCounts casts;  ///< Since the last iteration that this log has reported, on all threads.
};

/// Prints it in one line, for people.
FASTAMP_API std::ostream& operator<<(std::ostream& out, const LoggedStep& row);

using LogCallback = std::function<void(const LoggedStep&)>;

/// Handle of log_to(): passes rows on until release() or its end. It may outlive the scaler, and
/// keeps nothing of it alive. Not thread-safe, as the scaler.
class FASTAMP_API StepLog {
 public:
  ~StepLog();
  StepLog(StepLog&&) noexcept;
  StepLog& operator=(StepLog&& other) noexcept;
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  /// Passes on what has not arrived yet. Waits for the device.
  void flush();
  /// Does the same, and ends the log. Safe to call again.
  void release();

 private:
  friend FASTAMP_API StepLog log_to(GradScaler& scaler, LogCallback callback, bool casts);
  friend FASTAMP_API StepLog log_to(StepGuard& guard, LogCallback callback, bool casts);
  StepLog(GradScaler& scaler, LogCallback callback, bool casts);
  StepLog(StepGuard& guard, LogCallback callback, bool casts);

  std::shared_ptr<scaler::StepLogger> logger_;
};

/// Passes a row for each iteration that a scaler ends from now on to a callback, in order.
///
/// Nothing waits for the device: the row of an iteration is sent to the host by update(), and is
/// passed on by the first update(), get_scale_async(), or other call that asks what has arrived,
/// which finds it there. On the CPU that is the update() itself. A GraphedStep logs too; casts that
/// a CUDA graph replays are not seen.
///
/// @code
///   auto log = fastamp::log_to(scaler, [](const fastamp::LoggedStep& row) {
///     std::clog << row << '\n';
///   });
/// @endcode
///
/// If the callback throws a std::exception, a warning says so and the log is released: training
/// goes on. A disabled scaler has no iterations and so no rows, nor has one on a device without
/// history().
/// @param scaler  May be moved, and destroyed, while the log is open.
/// @param callback  Called on the thread that uses the scaler. It may use the scaler for reading.
/// @param casts  Count casts, as a Trace does: under a microsecond per op call.
/// @throws c10::ValueError if the callback is empty or history_size is 0; c10::Error if the scaler
///     was moved from.
[[nodiscard]] FASTAMP_API StepLog log_to(GradScaler& scaler, LogCallback callback,
                                         bool casts = true);
/// Logs each step of a guard; the scale is 1.
[[nodiscard]] FASTAMP_API StepLog log_to(StepGuard& guard, LogCallback callback, bool casts = true);

}  // namespace fastamp
