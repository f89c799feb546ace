// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/trace.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <memory>
#include <vector>

using fastamp::AutocastGuard;
using namespace fastamp::test;

// Values are small integers: a stale cast shows as a wrong whole number.

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a weight is cast once per region",
                 "[autocast][cache]") {
  const auto dtype = GENERATE(c10::kBFloat16, c10::kHalf);
  const auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, dtype);
  const auto first = column_sums(w);
  const auto second = column_sums(w);
  CHECK(node_of_argument(first, 1) == node_of_argument(second, 1));
  CHECK(is_cast_kept(w));
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: gradients of all uses of one cast add up",
                 "[autocast][cache]") {
  const auto w = make_weight(2, 2);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  column_sums(w).sum().add(column_sums(w).sum()).backward();
  CHECK(at::equal(w.grad(), at::full({2, 2}, 2.0)));
  // The cast outlives the graph that was just freed.
  column_sums(w).sum().backward();
  CHECK(at::equal(w.grad(), at::full({2, 2}, 3.0)));
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: only float32 leaves that require gradients are kept",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK_FALSE(is_cast_kept(at::ones({4, 4})));
  CHECK_FALSE(is_cast_kept(w.slice(0, 0, 2).t()));
  CHECK_FALSE(is_cast_kept(w.mul(1)));
  CHECK_FALSE(is_cast_kept(w.detach()));
  CHECK_FALSE(is_cast_kept(at::ones({4, 4}, c10::kHalf).requires_grad_()));
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: an op that wants float32 never meets a lower cast",
                 "[autocast][cache]") {
  const auto w = make_weight(2, 2, 257.0);  // not a bfloat16 number
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  column_sums(w);
  CHECK(at::trace(w).item<float>() == 514.0F);
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a nested region of another dtype gets its own casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard outer(c10::kCPU, c10::kBFloat16);
  const auto before = column_sums(w);
  {
    const AutocastGuard inner(c10::kCPU, c10::kHalf);
    CHECK(column_sums(w).scalar_type() == c10::kHalf);
    CHECK(is_cast_kept(w));
  }
  const auto after = column_sums(w);
  CHECK(after.scalar_type() == c10::kBFloat16);
  CHECK(node_of_argument(before, 1) == node_of_argument(after, 1));
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a weight changed in place is cast again",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 4.0F);
  SECTION("as optimizers do") {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  SECTION("through a view") {
    const at::NoGradGuard no_grad;
    w.view({-1}).add_(1);
  }
  SECTION("through detach, which shares the version counter") { w.detach().add_(1); }
  SECTION("in inference mode") {
    const c10::InferenceMode inference;
    w.add_(1);
  }
  CHECK(first_sum(w) == 8.0F);
  CHECK(is_cast_kept(w));
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a weight transposed in place is cast again",
                 "[autocast][cache]") {
  auto w = make_weight(2, 2, 0.0);
  edit_behind(w.select(0, 0), 1.0);  // rows (1 1) and (0 0)
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(at::mm(w, at::ones({2, 1})).select(0, 0).item<float>() == 2.0F);
  {
    const at::NoGradGuard no_grad;
    w.t_();
  }
  CHECK(at::mm(w, at::ones({2, 1})).select(0, 0).item<float>() == 1.0F);
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a weight whose data was swapped is cast again",
                 "[autocast][cache]") {
  auto w = make_weight(64, 64);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 64.0F);
  SECTION("by other data") {
    w.set_data(at::full({64, 64}, 2.0));
    CHECK(first_sum(w) == 128.0F);
  }
  SECTION("by fewer rows of the same data") {
    w.set_data(w.data().slice(0, 0, 8));
    CHECK(first_sum(w) == 8.0F);
  }
  SECTION("by later rows of the same data") {
    w.data().slice(0, 32).fill_(3.0);
    w.set_data(w.data().slice(0, 32));
    CHECK(first_sum(w) == 96.0F);
  }
  SECTION("by the same data transposed") {
    edit_behind(w.slice(0, 1), -1.0);  // ones in the first row, zeros below
    fastamp::clear_cast_cache();
    CHECK(first_sum(w) == 1.0F);
    w.set_data(w.data().t());
    CHECK(first_sum(w) == 64.0F);
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: new data at the old data's address is cast again",
                 "[autocast][cache]") {
  // What sharded training does: the full weight is freed and gathered anew, by chance or by a
  // caching allocator into the same memory. Here the memory is the test's, so that it always is.
  std::vector<float> memory(64 * 64, 1.0F);
  const auto tensor_there = [&] { return at::from_blob(memory.data(), {64, 64}, at::kFloat); };
  auto w = tensor_there().requires_grad_();
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 64.0F);
  w.set_data(at::ones({1, 1}));
  std::fill(memory.begin(), memory.end(), 2.0F);
  w.set_data(tensor_there());
  CHECK(first_sum(w) == 128.0F);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: a weight frozen in a region has no history, thawed it has",
                 "[autocast][cache]") {
  auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(column_sums(w).requires_grad());
  w.requires_grad_(false);
  CHECK_FALSE(column_sums(w).requires_grad());
  w.requires_grad_(true);
  column_sums(w).sum().backward();
  CHECK(at::equal(w.grad(), at::ones({4, 4})));
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: a cast first made without gradients does not cut them off later",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  SECTION("no_grad") {
    const at::NoGradGuard no_grad;
    CHECK(is_cast_kept(w));
  }
  SECTION("inference mode") {
    const c10::InferenceMode inference;
    CHECK(is_cast_kept(w));
  }
  column_sums(w).sum().backward();
  CHECK(at::equal(w.grad(), at::ones({4, 4})));
  {
    const at::NoGradGuard no_grad;
    CHECK_FALSE(column_sums(w).requires_grad());
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: an inference tensor is used but not kept",
                 "[autocast][cache]") {
  const c10::InferenceMode inference;
  const auto w = at::ones({4, 4});
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(column_sums(w).scalar_type() == c10::kBFloat16);
  CHECK_FALSE(is_cast_kept(w));
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: thousands of weights keep their own casts",
                 "[autocast][cache]") {
  constexpr int kWeights = 3000;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < kWeights; ++i) {
    weights.push_back(make_weight(1, 1, i % 256));
  }
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  std::vector<NodePointer> nodes;
  for (const auto& w : weights) {
    nodes.push_back(node_of_argument(column_sums(w), 1));
  }
  int wrong = 0;
  for (int i = 0; i < kWeights; ++i) {
    const auto result = column_sums(weights[static_cast<std::size_t>(i)]);
    wrong += result.item<float>() != static_cast<float>(i % 256) ? 1 : 0;
    wrong += node_of_argument(result, 1) != nodes[static_cast<std::size_t>(i)] ? 1 : 0;
  }
  CHECK(wrong == 0);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: clear_cast_cache drops the casts, cache_enabled=false makes none",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 4.0F);
  edit_behind(w, 1.0);
  CHECK(first_sum(w) == 4.0F);
  {
    const AutocastGuard uncached(c10::kCPU, c10::kBFloat16, true, false);
    CHECK(first_sum(w) == 8.0F);
    CHECK_FALSE(is_cast_kept(w));
  }
  fastamp::clear_cast_cache();
  CHECK(first_sum(w) == 8.0F);
}
