// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>
#include <fastamp/optim/step_gate.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <utility>
#include <vector>

namespace fastamp::optim {

/// An optimizer whose step() can be decided on the device. A gradient scaler finds it by
/// dynamic_cast, sets a gate and calls step(); nothing waits for the device.
///
/// Not thread-safe, as optimizers are not.
class FASTAMP_API GatedOptimizer {
 public:
  virtual ~GatedOptimizer();

  /// The next step(), and no other, goes through this gate.
  void set_gate(StepGate gate) { gate_ = std::move(gate); }
  /// Takes back a gate that no step() has used.
  void clear_gate() { gate_.reset(); }

  /// From now on step() reads the learning rates of the parameter groups from these tensors
  /// (float32 or float64, one element, one for each group), and no longer from the options: a
  /// captured CUDA graph sees what is written to them between replays. An empty list ends that.
  void set_learning_rates(std::vector<at::Tensor> rates) { learning_rates_ = std::move(rates); }

 protected:
  GatedOptimizer() = default;
  GatedOptimizer(const GatedOptimizer&) = default;
  GatedOptimizer(GatedOptimizer&&) = default;
  GatedOptimizer& operator=(const GatedOptimizer&) = default;
  GatedOptimizer& operator=(GatedOptimizer&&) = default;

  /// The gate of this step: the one that was set, or an open one.
  StepGate take_gate() { return std::exchange(gate_, std::nullopt).value_or(StepGate{}); }
  at::ArrayRef<at::Tensor> learning_rates() const { return learning_rates_; }

 private:
  std::optional<StepGate> gate_;
  std::vector<at::Tensor> learning_rates_;
};

}  // namespace fastamp::optim
