// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/make/float8_cast.h"
#include "autocast/make/tensor_identity.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace fastamp::autocast {

/// The fp8 casts of weights made by the regions of one thread. Beside CastCache, whose entries are
/// tensors with a history: these have none, since the node of the product leads to the weight.
///
/// An entry is used while the weight's version, memory, sizes, stream and capture are as they were.
class Float8Casts {
 public:
  /// The cast of a weight, if it is current and has what is wanted.
  std::optional<Float8Cast> find(const at::Tensor& weight, c10::ScalarType to, Float8Wanted wanted);

  /// Keeps a cast, made just now; replaces the weight's earlier one. The weight has an identity.
  void insert(const at::Tensor& weight, c10::ScalarType to, const Float8Cast& cast);

  /// Drops the casts of some tensors, which may be dead.
  void forget(const std::vector<const c10::TensorImpl*>& weights);

  void clear() noexcept;
  bool empty() const { return entries_.empty(); }

 private:
  struct Entry {
    TensorIdentity source;
    std::vector<std::int64_t> strides;
    c10::ScalarType to;
    Float8Cast cast;
  };

  void forget_changed();

  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::uint64_t seen_changes_ = 0;  ///< Changes (changed_weights.h) that the entries reflect.
};

}  // namespace fastamp::autocast
