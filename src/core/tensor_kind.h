// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

// What kind of tensor is this? Ask here before reading a tensor's sizes, strides, storage or
// numbers: it may have none, or run user code to compute them. Each answer is a test of the bits of
// the tensor's key set.
namespace fastamp {

/// Whether a tensor's numbers are what its memory on CPU or CUDA holds, at its sizes and strides,
/// with none still to be negated, computed or asked of Python. False for nested, sparse, mkldnn and
/// quantized tensors, fake and meta ones, Python subclasses that see their ops,
/// functional and vmapped ones, named ones.
inline bool is_ordinary(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kOrdinary(
      {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
       DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
  const auto keys = tensor.key_set();
  return (keys | kOrdinary) == kOrdinary && keys.has(DispatchKey::Dense);
}

/// Whether that holds of a tensor in host memory.
inline bool is_ordinary_cpu(const at::Tensor& tensor) {
  return is_ordinary(tensor) && tensor.key_set().has_backend(c10::BackendComponent::CPUBit);
}

/// Whether a tensor has sizes, strides and an offset in its storage that can be read without
/// running user code. Its numbers may be of any kind, or absent (meta).
inline bool has_geometry(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kDense(DispatchKey::Dense);
  constexpr c10::DispatchKeySet kAsked({DispatchKey::Dense, DispatchKey::Python,
                                        DispatchKey::FuncTorchBatched, DispatchKey::Batched,
                                        DispatchKey::Functionalize});
  return (tensor.key_set() & kAsked) == kDense;
}

}  // namespace fastamp
