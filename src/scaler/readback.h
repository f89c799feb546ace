// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <vector>

namespace fastamp::scaler {

/// Scalars on their way to the host: started now, read when they have arrived.
///
/// On CUDA each is copied to pinned memory on its device's current stream, followed by an event. On
/// the CPU they have arrived at once. Elsewhere they are kept and read on demand. The scalars may
/// be overwritten right after construction. Must not be made while a stream is captured.
/// Not thread-safe.
class FASTAMP_API Readback {
 public:
  /// @param scalars  fp32 tensors of one element, on any devices.
  explicit Readback(const std::vector<at::Tensor>& scalars);

  /// Whether values() would return without waiting. Never waits itself.
  bool ready() const;

  /// Returns the values, in order. sync: waits for those that have not arrived.
  std::vector<double> values();

 private:
  struct Scalar {
    double value = 0.0;
    at::Tensor source;  // undefined where the value is known
  };

  std::vector<Scalar> scalars_;
  std::vector<c10::Event> events_;
  bool on_demand_ = false;
};

}  // namespace fastamp::scaler
