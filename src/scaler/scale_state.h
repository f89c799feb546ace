// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/scale_ops.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace fastamp::scaler {

/// A loss scale that lives on the device of the first tensor it scales.
///
/// Until then only the initial values exist, on the host. Reading the values back is the only
/// operation that waits for the device. Not thread-safe.
class ScaleState {
 public:
  ScaleState(double init_scale, const ScaleRules& initial_rules)
      : rules_(initial_rules), init_scale_(init_scale) {}

  const ScaleRules& rules() const { return rules_; }
  ScaleRules& rules() { return rules_; }

  /// Number of calls of scaled(): in between, gradients may have come that are scaled.
  std::uint64_t times_scaled() const { return times_scaled_; }

  bool initialised() const { return tensors_.scale.defined(); }
  const at::Tensor& scale_tensor() const { return tensors_.scale; }
  ScaleTensors& tensors() { return tensors_; }

  /// Returns tensor * scale, with torch's type promotion; creates the scale on first use.
  at::Tensor scaled(const at::Tensor& tensor);
  /// Scales several tensors; the scale is copied once to each device met.
  std::vector<at::Tensor> scaled(at::ArrayRef<at::Tensor> tensors);

  double scale() const;                // sync: copies the scalar to the host
  int64_t growth_tracker() const;      // sync: copies the scalar to the host
  int64_t hysteresis_tracker() const;  // sync: copies the scalar to the host

  double fast_growth_limit() const;  // sync: copies the scalar to the host

  /// The tensors with those that other rules need besides, for load(), which then needs no memory.
  ScaleTensors tensors_for(const ScaleRules& rules) const;
  /// Replaces the rules and all four values, on the device too once it is known.
  /// @param tensors  From tensors_for() these rules.
  void load(const ScaleRules& rules, const ScaleTensors& tensors, double scale,
            int64_t growth_tracker, int64_t hysteresis_tracker, double fast_growth_limit);

 private:
  void initialise(c10::Device device);

  ScaleRules rules_;
  ScaleTensors tensors_;
  double init_scale_;
  std::uint64_t times_scaled_ = 0;
  int64_t init_growth_tracker_ = 0;
  int64_t init_hysteresis_tracker_ = rules_.hysteresis;
  double init_fast_growth_limit_ = std::numeric_limits<double>::infinity();
};

}  // namespace fastamp::scaler
