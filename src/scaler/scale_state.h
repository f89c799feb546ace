#pragma once

#include "scaler/scale_ops.h"

#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace fastamp::scaler {

/// A loss scale that lives on the device of the first tensor it scales.
///
/// Until then only the initial values exist, on the host. Reading the values back is the only
/// operation that waits for the device. Not thread-safe.
class ScaleState {
 public:
  /// @param history_size  Rows of the history; 0: none.
  ScaleState(double init_scale, const ScaleRules& initial_rules, int64_t history_size = 0)
      : rules_(initial_rules), init_scale_(init_scale), history_size_(history_size) {}

  const ScaleRules& rules() const { return rules_; }
  ScaleRules& rules() { return rules_; }

  /// How often scaled() was called: in between, gradients may have come that are scaled.
  std::uint64_t times_scaled() const { return times_scaled_; }

  bool initialised() const { return tensors_.scale.defined(); }
  const at::Tensor& scale_tensor() const { return tensors_.scale; }

  /// Returns tensor * scale, with torch's type promotion; creates the scale on first use.
  at::Tensor scaled(const at::Tensor& tensor);
  /// The same for several tensors; the scale is copied once to each device met.
  std::vector<at::Tensor> scaled(at::ArrayRef<at::Tensor> tensors);

  /// 1 / scale, fp32 on the scale's device; on CUDA without a launch. Do not write it.
  at::Tensor inv_scale() const;

  /// Ends an iteration with these flags.
  /// @param norm       fp32, one element, for the history; may be undefined.
  /// @param new_scale  One element, on any device; undefined: the rules decide.
  void update(at::ArrayRef<at::Tensor> flags, const at::Tensor& norm = {},
              const at::Tensor& new_scale = {});
  void set_scale(const at::Tensor& value);

  double scale() const;                // sync: copies the scalar to the host
  int64_t growth_tracker() const;      // sync: copies the scalar to the host
  int64_t hysteresis_tracker() const;  // sync: copies the scalar to the host

  bool keeps_history() const { return records_.history.defined(); }
  std::vector<StepRecord> history() const;  // sync: copies the ring to the host
  /// Replaces the history by rows of consecutive steps; the last history_size are kept.
  void load_history(std::vector<StepRecord> rows);

  /// Replaces all three values, on the device too once it is known.
  void load(double scale, int64_t growth_tracker, int64_t hysteresis_tracker);

 private:
  void initialise(c10::Device device);
  void refresh_inverse();
  void write_history();

  ScaleRules rules_;
  ScaleTensors tensors_;
  ScaleRecords records_;
  double init_scale_;
  int64_t history_size_;
  std::uint64_t times_scaled_ = 0;
  int64_t init_growth_tracker_ = 0;
  int64_t init_hysteresis_tracker_ = rules_.hysteresis;
  std::vector<StepRecord> init_history_;
};

}  // namespace fastamp::scaler
