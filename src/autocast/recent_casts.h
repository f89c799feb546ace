// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/tensor_identity.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include <array>
#include <cstdint>
#include <optional>

namespace fastamp::autocast {

/// The last few casts of activations on one thread.
///
/// An activation often feeds several ops of a region (query, key and value; gate and up), and each
/// would cast it and save its own copy for backward. With this store they share the memory of one
/// cast. Each use still gets a tensor and an autograd node of its own, so that gradients are cast
/// back and summed as if nothing were shared: bit for bit torch's.
///
/// Only activations with an autograd history take part. Others may be buffers whose memory is
/// written behind torch's back (numpy arrays, `x.data.copy_()`), which no version counter shows.
/// The store refers to activations and casts weakly: it keeps nothing alive, and a cast can be
/// shared as long as some op has saved it for backward.
class RecentCasts {
 public:
  /// A tensor over the memory of an earlier cast of `source`, without history, or an undefined
  /// tensor.
  at::Tensor find(const at::Tensor& source, c10::ScalarType to);

  /// Remembers `cast`, made just now from `source`, both plain and dense.
  void keep(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast);

  void clear() noexcept;

 private:
  /// Enough for query, key and value beside a residual branch; a ninth cast replaces the first.
  static constexpr std::size_t kSlots = 8;

  struct Slot {
    TensorIdentity source;
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    c10::VariableVersion cast_version;
    std::uint32_t cast_version_then;
    c10::ScalarType to;
  };

  std::array<std::optional<Slot>, kSlots> slots_;
  std::size_t next_ = 0;
};

}  // namespace fastamp::autocast
