// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <utility>
#include <vector>

namespace fastamp::optim {

/// An optimizer whose step() can be decided on the device. A gradient scaler finds it by
/// dynamic_cast, sets an AmpStep and calls step(); nothing waits for the device.
///
/// Not thread-safe, as optimizers are not.
class FASTAMP_API AmpStepOptimizer {
 public:
  virtual ~AmpStepOptimizer();

  /// Sets what the next step(), and no other, is asked for.
  void set_amp_step(AmpStep amp_step) { amp_step_ = std::move(amp_step); }
  /// Takes back what no step() has used.
  void clear_amp_step() { amp_step_.reset(); }

  /// Makes step() read the learning rates of the parameter groups from these tensors from now on
  /// (float32 or float64, one element, one for each group), and no longer from the options: a
  /// captured CUDA graph sees what is written to them between replays. An empty list ends that.
  void set_learning_rates(std::vector<at::Tensor> rates) { learning_rates_ = std::move(rates); }

 protected:
  AmpStepOptimizer() = default;
  AmpStepOptimizer(const AmpStepOptimizer&) = default;
  AmpStepOptimizer(AmpStepOptimizer&&) = default;
  AmpStepOptimizer& operator=(const AmpStepOptimizer&) = default;
  AmpStepOptimizer& operator=(AmpStepOptimizer&&) = default;

  /// Takes what this step is asked for: what was set, or nothing but to step.
  AmpStep take_amp_step() { return std::exchange(amp_step_, std::nullopt).value_or(AmpStep{}); }
  at::ArrayRef<at::Tensor> learning_rates() const { return learning_rates_; }

 private:
  std::optional<AmpStep> amp_step_;
  std::vector<at::Tensor> learning_rates_;
};

}  // namespace fastamp::optim
