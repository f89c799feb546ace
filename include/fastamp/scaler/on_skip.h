// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/scaler/reports.h>

#include <functional>
#include <memory>
#include <utility>

namespace torch::optim {
class Optimizer;
}

namespace fastamp {

/// A step that a GradScaler or StepGuard has skipped. If no history is kept (history_size 0), the
/// norm is NaN and the growth_tracker 0.
struct SkippedStep : StepRecord {
  /// The optimizer that skipped. Compare it only: the optimizer may be gone by now.
  const torch::optim::Optimizer* optimizer = nullptr;
};

using SkipCallback = std::function<void(const SkippedStep&)>;

namespace scaler {
struct SkipHook;
}

/// Handle of register_on_skip() of a scaler or guard. The callback stays when this is destroyed.
/// May outlive the scaler. Not thread-safe, as the scaler.
class FASTAMP_API SkipHandle {
 public:
  /// Ends the calls, also from within one. Safe to call again.
  void remove();

 private:
  friend class GradScaler;
  friend class StepGuard;
  explicit SkipHandle(std::weak_ptr<scaler::SkipHook> hook) : hook_(std::move(hook)) {}

  std::weak_ptr<scaler::SkipHook> hook_;
};

}  // namespace fastamp
