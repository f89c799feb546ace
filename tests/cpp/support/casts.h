#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>

namespace torch::autograd {
struct Node;
}

// Seeing casts without knowing how they are made.
namespace fastamp::test {

/// The autograd node through which the result of an op hands gradients on to its n-th argument. Two
/// uses of one cast share it; two casts do not.
std::shared_ptr<torch::autograd::Node> node_of_argument(const at::Tensor& result, std::size_t n);

/// A float32 parameter of this size with the value `fill` in every element.
at::Tensor make_weight(std::int64_t rows, std::int64_t columns, double fill = 1.0);

/// mm(ones[1, rows], weight): each element is the sum of a column. Small integers, so exact in every
/// dtype.
at::Tensor column_sums(const at::Tensor& weight);

/// The first column sum.
float first_sum(const at::Tensor& weight);

/// Adds `value` to every element so that no version counter shows it: a kept cast is then seen in
/// results that do not change.
void edit_behind(const at::Tensor& weight, double value);

/// Whether the casts of `weight` made now are kept: uses it, edits it behind its version counter and
/// looks whether the result changes. Restores the weight.
bool is_cast_kept(const at::Tensor& weight);

}  // namespace fastamp::test
