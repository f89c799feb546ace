// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <vector>

namespace fastamp::scaler {

/// Numbers on their way to the host: on their way from start() on, read when they have arrived.
///
/// On CUDA each is copied to pinned memory on its device's current stream, followed by an event. On
/// the CPU they have arrived at once. Elsewhere they are kept and read on demand. Must not be made
/// while a stream is captured. Not thread-safe.
class FASTAMP_API Readback {
 public:
  /// Makes room for numbers that may not be there yet. All that needs memory is done here.
  /// @param numbers  fp32 tensors of one element, on any devices, and vectors on CPU or CUDA.
  explicit Readback(const std::vector<at::Tensor>& numbers);

  /// Sends the numbers as they are now. The tensors may be overwritten right afterwards.
  void start();

  /// Whether values() would return without waiting. Never waits itself.
  bool ready() const;

  /// Returns the values, in order. sync: waits for those that have not arrived.
  std::vector<double> values() const;

 private:
  struct Source {
    double value = 0.0;
    at::Tensor from;    // undefined once it was sent
    at::Tensor tensor;  // undefined where the value is known
  };

  std::vector<Source> sources_;
  std::vector<c10::Device> devices_;
  std::vector<c10::Event> events_;  // one for each device
  bool on_demand_ = false;
};

}  // namespace fastamp::scaler
