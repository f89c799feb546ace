// SPDX-License-Identifier: Apache-2.0
#include "support/casts.h"

#include "support/catch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

namespace fastamp::test {

NodePointer node_of_argument(const at::Tensor& result, std::size_t n) {
  const auto node = result.grad_fn();
  REQUIRE(node != nullptr);
  return node->next_edge(n).function;
}

at::Tensor make_weight(std::int64_t rows, std::int64_t columns, double fill) {
  return at::full({rows, columns}, fill, at::kFloat).requires_grad_();
}

at::Tensor column_sums(const at::Tensor& weight) {
  return at::mm(at::ones({1, weight.size(0)}, at::kFloat), weight);
}

float first_sum(const at::Tensor& weight) { return column_sums(weight).select(1, 0).item<float>(); }

void edit_behind(const at::Tensor& weight, double value) {
  // .data() has a version counter of its own.
  weight.data().add_(value);
}

bool is_cast_kept(const at::Tensor& weight) {
  const float before = first_sum(weight);
  edit_behind(weight, 1.0);
  const float after = first_sum(weight);
  edit_behind(weight, -1.0);
  return before == after;
}

}  // namespace fastamp::test
