// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

// The devices that have op policies, and the tensors that their policies may cast.
namespace fastamp::autocast {

/// A device for which ops have a policy: a column of the op table. The values index arrays.
enum class PolicyDevice : std::uint8_t { kCpu, kCuda };
inline constexpr std::size_t kNumPolicyDevices = 2;

constexpr c10::DeviceType device_type(PolicyDevice device) {
  return device == PolicyDevice::kCpu ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
}

constexpr c10::DispatchKey autocast_key(PolicyDevice device) {
  return device == PolicyDevice::kCpu ? c10::DispatchKey::AutocastCPU
                                      : c10::DispatchKey::AutocastCUDA;
}

inline bool is_on(const at::Tensor& tensor, PolicyDevice device) {
  // The two odd backends are torch's rule: oneDNN tensors follow the CPU region, XLA tensors the
  // CUDA one.
  return device == PolicyDevice::kCpu ? tensor.is_cpu() || tensor.is_mkldnn()
                                      : tensor.is_cuda() || tensor.is_xla();
}

/// Whether autocast may cast this tensor at all. False for an undefined tensor.
inline bool is_eligible(const at::Tensor& tensor, PolicyDevice device) {
  const auto dtype = tensor.scalar_type();
  return c10::isFloatingType(dtype) && dtype != c10::kDouble && is_on(tensor, device);
}

/// The dtype test comes first: most tensors of a region already have the dtype wanted.
inline bool needs_cast(const at::Tensor& tensor, c10::ScalarType to, PolicyDevice device) {
  return tensor.scalar_type() != to && is_eligible(tensor, device);
}

}  // namespace fastamp::autocast
