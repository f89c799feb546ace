// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/libtorch_optimizer.h"
#include "scaler/named_report.h"
#include "scaler/scale_state.h"
#include "scaler/scaler_core.h"

#include <fastamp/scaler/grad_scaler.h>

#include <optional>

namespace fastamp {

/// Data that GradScaler has beside the core: options, the scale, errors.
struct GradScaler::Impl {
  explicit Impl(const GradScalerOptions& given);

  void expect_scale(const char* function) const;
  /// @throws c10::ValueError for rules that the constructor refuses.
  void set_rules(const char* function, const scaler::ScaleRules& rules);
  scaler::ScalerCall call() const;

  /// Refuses a call on an optimizer that comes before scale(), out of order, or with gradients that
  /// are scaled anew although the optimizer is unscaled. Changes nothing.
  void begin(const char* function, const torch::optim::Optimizer& optimizer) const;
  /// Unscales in place, and applies clips that were put off.
  void unscale(torch::optim::Optimizer& optimizer, scaler::OptimizerRecord& record);
  /// Whether gradients were checked that stay scaled until the step.
  bool check(torch::optim::Optimizer& optimizer, scaler::OptimizerRecord& record);
  /// Does at once what was put off to the step: unscales, clips by norm, clips by value.
  void clip_now(torch::optim::Optimizer& optimizer, scaler::OptimizerRecord& record);
  /// Clips by a norm of the optimizer's gradients, undefined if there are none.
  at::Tensor clip_norm(torch::optim::Optimizer& optimizer, const scaler::NormClip& clip);
  void clip_value(torch::optim::Optimizer& optimizer, double clip_value);
  at::Tensor step_on_device(torch::optim::Optimizer& optimizer, scaler::OptimizerRecord& record);
  std::optional<at::Tensor> step_if_finite(torch::optim::Optimizer& optimizer,
                                           scaler::OptimizerRecord& record);

  /// Ends the iteration, by the rules or with a scale of the caller's. Without an outcome there was
  /// none: then a new scale is all that changes.
  void update(const at::Tensor& new_scale = {});
  /// Takes in what the device has reported, or waits for all of it; warns if that calls for it.
  void poll(bool wait);
  /// Polls at the end of an iteration, for which a hook may want to be waited.
  void notify_of_iteration();
  /// Warns if that is due, and gives loggers and hooks what has arrived.
  void report_news();
  void warn_if_due();
  OverflowReport report(const scaler::ParameterNames& names) const;
  UnderflowReport underflows(const scaler::ParameterNames& names) const;

  GradScalerOptions options;
  bool enabled;
  scaler::ScaleState state;
  scaler::ScalerCore core;
  OverflowReport loaded_report;  ///< Until the next overflow.
  bool capturing = false;        ///< A CUDA graph is being captured.
};

}  // namespace fastamp
