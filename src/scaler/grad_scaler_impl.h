// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/libtorch_optimizer.h"
#include "scaler/scale_state.h"
#include "scaler/scaler_core.h"

#include <fastamp/scaler/grad_scaler.h>

#include <string>
#include <unordered_map>

namespace fastamp {

/// What step() says of an optimizer without gradients.
inline constexpr const char* kNoGradients =
    "step: expected an optimizer with at least one gradient, got none. No inf checks were recorded "
    "for this optimizer.";

/// By the identity of the parameter.
using ParameterNames = std::unordered_map<const void*, std::string>;
ParameterNames names_by_identity(
    const torch::OrderedDict<std::string, at::Tensor>& named_parameters);

/// What GradScaler has beside the core: options, the scale, errors.
struct GradScaler::Impl {
  explicit Impl(const GradScalerOptions& given);

  void expect_scale(const char* function) const;
  /// @throws c10::ValueError for rules that the constructor refuses.
  void set_rules(const char* function, const scaler::ScaleRules& rules);
  scaler::ScalerCall call() const;

  /// Refuses an optimizer whose gradients were unscaled and are scaled anew.
  void check_iteration(const char* function, const scaler::LibTorchOptimizer& port,
                       const scaler::ScalerCall& call) const;
  /// The stage of an optimizer; kReady if it has no record.
  scaler::Stage stage_of(const scaler::LibTorchOptimizer& port) const;
  void begin_clipping(const char* function, const scaler::LibTorchOptimizer& port,
                      const scaler::ScalerCall& call) const;
  /// Whether clipping may be put off to the step of an optimizer.
  bool may_put_off(scaler::LibTorchOptimizer& port) const;
  std::optional<at::Tensor> step_if_finite(torch::optim::Optimizer& optimizer,
                                           scaler::LibTorchOptimizer& port,
                                           const scaler::ScalerCall& call);

  /// Ends the iteration, by the rules or with a scale of the caller's. Without an outcome there was
  /// none: then a new scale is all that changes.
  void update(const at::Tensor& new_scale = {});
  /// Takes in what the device has told, or waits for all of it; warns if that calls for it.
  void settle(bool wait);
  /// The same at the end of an iteration, for which a hook may want to be waited.
  void tell_of_iteration();
  /// Warns if that is due, and gives loggers and hooks what has arrived.
  void tell();
  void warn_if_due();
  OverflowReport report(const ParameterNames& names) const;
  UnderflowReport underflows(const ParameterNames& names) const;

  GradScalerOptions options;
  bool enabled;
  scaler::ScaleState state;
  scaler::ScalerCore core;
  OverflowReport loaded_report;  ///< Until the next overflow.
  bool capturing = false;        ///< A CUDA graph is being captured.
};

}  // namespace fastamp
