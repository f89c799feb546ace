// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace fastamp::autocast {

/// Counts per weight how many requests name it, such as to keep its casts. Keeps no weight alive.
/// Not thread-safe.
class WeightRequests {
 public:
  using Keys = std::vector<const c10::TensorImpl*>;

  /// Casts that were forgotten. Destroy them without a lock: a tensor's memory is freed with its
  /// last reference of any kind, and symbolic sizes in it are Python objects.
  struct Forgotten {
    Keys unrequested;  ///< No request names these any more.
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> references;
  };

  /// Requests weights until release() is called with the returned number.
  std::uint64_t acquire(const std::vector<at::Tensor>& weights);

  /// Adds a weight to the request with this number, unless it is part of it already.
  void add(std::uint64_t id, const at::Tensor& weight);

  /// An unknown number is ignored.
  Forgotten release(std::uint64_t id);

  /// Forgets weights that are gone.
  Forgotten take_dead();

  bool contains(const c10::TensorImpl* weight) const { return times_.contains(weight); }
  bool empty() const { return times_.empty(); }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  /// Adds a weight of a request to what was forgotten; changes nothing here if memory fails.
  void forget(const c10::TensorImpl* key, const WeakTensor& weight, Forgotten& forgotten);

  /// Whether no request names the weight any more.
  bool count_down(const c10::TensorImpl* weight);

  std::uint64_t next_id_ = 1;
  std::unordered_map<const c10::TensorImpl*, std::uint32_t> times_;
  /// Their weak references keep the addresses in times_ from being used again.
  std::unordered_map<std::uint64_t, std::unordered_map<const c10::TensorImpl*, WeakTensor>>
      acquired_;
};

}  // namespace fastamp::autocast
