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
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  /// Weak references to weights, which keep their addresses from being used again.
  using Weights = std::unordered_map<const c10::TensorImpl*, WeakTensor>;

  /// Requests weights until release() is called with the returned number.
  std::uint64_t acquire(const std::vector<at::Tensor>& weights);

  /// Adds a weight to the request with this number, unless it is part of it already.
  void add(std::uint64_t id, const at::Tensor& weight);

  // Those that no request names any more. Destroy them without a lock: a tensor's memory is freed
  // with its last reference of any kind, and symbolic sizes in it are Python objects.

  /// Ends a request. Needs no memory: destructors call it. An unknown number is ignored.
  Weights release(std::uint64_t id) noexcept;

  /// Forgets weights that are gone.
  Weights take_dead();

  bool contains(const c10::TensorImpl* weight) const { return times_.contains(weight); }
  bool empty() const { return times_.empty(); }

 private:
  /// Whether no request names the weight any more.
  bool count_down(const c10::TensorImpl* weight);

  std::uint64_t next_id_ = 1;
  std::unordered_map<const c10::TensorImpl*, std::uint32_t> times_;
  std::unordered_map<std::uint64_t, Weights> acquired_;
};

}  // namespace fastamp::autocast
