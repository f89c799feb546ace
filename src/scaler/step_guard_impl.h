// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/named_report.h"
#include "scaler/scaler_core.h"
#include "scaler/spike_rule.h"

#include <fastamp/scaler/step_guard.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastamp {

/// Data that StepGuard has beside the core, which sees gradients at a scale of 1.
struct StepGuard::Impl {
  Impl(torch::optim::Optimizer& given, const StepGuardOptions& wanted);

  /// @param agrees  Lets ranks agree.
  scaler::ScalerCall call(bool agrees = false) const;
  /// Readies the record for a step or clip: makes the scale, forgets an iteration that was broken
  /// off.
  scaler::RecordPointer begin();
  /// Checks gradients, in place where they cannot be checked otherwise.
  void check(scaler::OptimizerRecord& record);
  /// @param end  Set to what end() will need, unless there are no gradients.
  std::optional<at::Tensor> step_checked(scaler::OptimizerRecord& record,
                                         std::optional<scaler::ScalerCore::PreparedEnd>& end);
  at::Tensor clip_norm(scaler::OptimizerRecord& record, const scaler::NormClip& clip);
  /// Ends the iteration of a step.
  void end(scaler::OptimizerRecord& record, std::optional<scaler::ScalerCore::PreparedEnd> end);
  void poll(bool wait);
  /// Warns if that is due, and gives loggers and hooks what has arrived.
  void report_news();
  void refuse_more_skips();

  torch::optim::Optimizer& optimizer;
  StepGuardOptions options;
  scaler::ScalerCore core;
  scaler::ScaleTensors one;
  std::optional<scaler::SpikeRule> spike;
  std::vector<at::Tensor> losses;  ///< Of the next step.
  OverflowReport loaded_report;    ///< Until the next overflow.
  std::uint64_t calls = 0;         ///< Between two, gradients may have come that are others.
};

}  // namespace fastamp
