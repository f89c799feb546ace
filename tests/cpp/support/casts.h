// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

// Seeing casts without knowing how they are made.
namespace fastamp::test {

/// What torch holds autograd nodes by: std::shared_ptr, in later versions c10::intrusive_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);

/// Sees whether a node is still there without keeping it.
class NodeWatch {
 public:
  NodeWatch() = default;
  explicit NodeWatch(const NodePointer& node) : node_(weak(node)) {}

  bool expired() const { return !node_ || node_->expired(); }
  bool operator==(const NodeWatch& other) const {
    return !expired() && !other.expired() && node_->lock() == other.node_->lock();
  }

 private:
  template <typename T>
  static std::weak_ptr<T> weak(const std::shared_ptr<T>& node) {
    return node;
  }
  template <typename T>
  static c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& node) {
    return c10::weak_intrusive_ptr<T>(node);
  }

  std::optional<decltype(weak(std::declval<NodePointer>()))> node_;
};

/// The autograd node through which the result of an op hands gradients on to its n-th argument. Two
/// uses of one cast share it; two casts do not.
NodePointer node_of_argument(const at::Tensor& result, std::size_t n);

/// A float32 parameter of this size with the value `fill` in every element.
at::Tensor make_weight(std::int64_t rows, std::int64_t columns, double fill = 1.0);

/// mm(ones[1, rows], weight): each element is the sum of a column. Small integers, so exact in
/// every dtype.
at::Tensor column_sums(const at::Tensor& weight);

/// The first column sum.
float first_sum(const at::Tensor& weight);

/// Adds `value` to every element so that no version counter shows it: a kept cast is then seen in
/// results that do not change.
void edit_behind(const at::Tensor& weight, double value);

/// Whether the casts of `weight` made now are kept: uses it, edits it behind its version counter
/// and looks whether the result changes. Restores the weight.
bool is_cast_kept(const at::Tensor& weight);

}  // namespace fastamp::test
