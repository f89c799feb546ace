// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

// The only copies between devices here that do not wait. A copy to the CPU must: asked not to,
// torch returns memory that the device has yet to write, and the host reads what was there before.

namespace fastamp {

/// The tensor itself if it is on `device` and of `dtype`, else a copy that is.
inline at::Tensor on_device(const at::Tensor& tensor, c10::Device device, at::ScalarType dtype) {
  return tensor.device() == device && tensor.scalar_type() == dtype
             ? tensor
             : tensor.to(device, dtype, /*non_blocking=*/!device.is_cpu());
}

/// A copy on `device`, also of a tensor that is there.
inline at::Tensor copy_on(const at::Tensor& tensor, c10::Device device, at::ScalarType dtype) {
  return tensor.to(device, dtype, /*non_blocking=*/!device.is_cpu(), /*copy=*/true);
}

/// Writes the values of `source` into `target`.
inline void copy_into(const at::Tensor& target, const at::Tensor& source) {
  target.copy_(source, /*non_blocking=*/!target.device().is_cpu());
}

}  // namespace fastamp
