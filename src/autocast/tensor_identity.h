// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/tensor_version.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace fastamp::autocast {

/// Place where a cast was computed: work queued elsewhere must not use it. All zero on CPU.
struct ExecutionContext {
  c10::StreamId stream = 0;
  std::uint64_t graph_capture = 0;  ///< CUDA graph being captured, 0 if none.

  bool operator==(const ExecutionContext&) const = default;
};

/// The stream and graph capture that work on `device` goes to now.
ExecutionContext execution_context(c10::Device device);

/// Whether work on this tensor is recorded into a CUDA graph now: each replay must do it again.
bool is_captured(const at::Tensor& tensor);

/// Whether the context on `device` can be known, so that casts may be kept. False for CUDA
/// without code for it.
bool knows_execution_context(c10::DeviceType device);

/// Identity: what a cast of a tensor depends on, to find out later whether it still holds. Keeps
/// nothing alive, but keeps the addresses it compares from being used again. Making, comparing and
/// destroying one runs no user code: a tensor's contents end with its last strong reference.
class TensorIdentity {
 public:
  /// Whether a tensor has what an identity is made of: a version counter, sizes that are numbers,
  /// and a device whose streams are known. Without a storage (sparse tensors) the version must
  /// suffice.
  static bool exists_for(const at::Tensor& tensor);

  /// @param tensor  One for which an identity exists.
  FASTAMP_API explicit TensorIdentity(const at::Tensor& tensor);

  /// Whether `tensor` is the same object with the same memory and version, and work on it goes
  /// to the same stream and capture as then.
  bool matches(const at::Tensor& tensor) const {
    return is_current(tensor) && is_in_same_context(tensor);
  }

  /// Whether `tensor` is the same object with the same memory and version.
  bool is_current(const at::Tensor& tensor) const;

  /// Whether `tensor` is the same object with the same memory; the values may have changed.
  bool is_in_same_place(const at::Tensor& tensor) const;

  /// The tensor, or an undefined one if it is gone.
  at::Tensor lock() const;
  bool is_expired() const { return tensor_.expired(); }

  /// Whether work on `tensor` goes to the same stream and capture as then.
  bool is_in_same_context(const at::Tensor& tensor) const {
    return tensor.is_cpu() || context_ == execution_context(tensor.device());
  }

  const c10::TensorImpl* key() const { return key_; }

 private:
  const c10::TensorImpl* key_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  c10::weak_intrusive_ptr<c10::StorageImpl>
      storage_;       ///< `p.data = x` may get the old address again.
  const void* data_;  ///< Resizing a storage moves it and bumps no version.
  ExecutionContext context_;
  std::uint32_t version_;
};

}  // namespace fastamp::autocast
