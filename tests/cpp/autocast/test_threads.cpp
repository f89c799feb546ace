// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"
#include "support/threads.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/registration.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <vector>

using fastamp::AutocastGuard;
using namespace fastamp::test;

TEST_CASE_METHOD(LeavesNoTrace, "threads: a region covers the thread that made it, no other",
                 "[autocast][threads]") {
  const AutocastGuard region(c10::kCPU, c10::kHalf);
  std::atomic<int> wrong = 0;
  run_threads(4, [&](int i) {
    const auto x = at::ones({2, 2});
    const auto fresh = public_state();
    wrong += fresh.cpu_enabled || fresh.depth != 0 || fresh.cpu_dtype != c10::kBFloat16 ? 1 : 0;
    wrong += at::mm(x, x).scalar_type() != c10::kFloat ? 1 : 0;
    const auto dtype = i % 2 == 0 ? c10::kHalf : c10::kBFloat16;
    {
      const AutocastGuard own(c10::kCPU, dtype);
      wrong += at::mm(x, x).scalar_type() != dtype ? 1 : 0;
    }
    wrong += !(public_state() == fresh) ? 1 : 0;
  });
  CHECK(wrong == 0);
  const auto x = at::ones({2, 2});
  CHECK(at::mm(x, x).scalar_type() == c10::kHalf);
}

TEST_CASE_METHOD(LeavesNoTrace, "threads: a region that ends leaves other threads' casts alone",
                 "[autocast][threads]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto cast = node_of_argument(column_sums(w), 1);
  std::atomic<int> shared = 0;
  run_threads(4, [&](int /*i*/) {
    const AutocastGuard own(c10::kCPU, c10::kBFloat16);
    shared += column_sums(w).grad_fn()->next_edge(1).function == cast ? 1 : 0;
  });
  CHECK(shared == 0);  // nor do they see fastamp's
  CHECK(node_of_argument(column_sums(w), 1) == cast);
}

TEST_CASE_METHOD(LeavesNoTrace, "threads: a thread that ends with casts kept frees them",
                 "[autocast][threads]") {
  const auto w = make_weight(4, 4);
  NodeWatch cast;
  run_threads(1, [&](int /*i*/) {
    new AutocastGuard(c10::kCPU, c10::kBFloat16);  // never ended
    cast = NodeWatch(column_sums(w).grad_fn()->next_edge(1).function);
  });
  CHECK(cast.expired());
}

TEST_CASE_METHOD(LeavesNoTrace, "threads: many train on shared weights in regions of their own",
                 "[autocast][threads]") {
  constexpr int kThreads = 8;
  constexpr int kRounds = 50;
  const auto w = make_weight(8, 8);
  std::atomic<int> wrong = 0;
  Meeting meeting(kThreads);
  run_threads(kThreads, [&](int i) {
    const auto own = make_weight(8, 8);
    meeting.wait();
    for (int round = 0; round < kRounds; ++round) {
      const auto dtype = (round + i) % 2 == 0 ? c10::kHalf : c10::kBFloat16;
      const AutocastGuard region(c10::kCPU, dtype);
      const auto y = column_sums(w).add(column_sums(own));
      wrong += y.scalar_type() != dtype ? 1 : 0;
      wrong += !at::equal(y, at::full({1, 8}, 16.0 + 8.0 * round, dtype)) ? 1 : 0;
      const AutocastGuard off(c10::kCPU, std::nullopt, false);
      const at::NoGradGuard no_grad;
      own.add_(1);
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "threads: the backward pass of a region runs without caching after it",
                 "[autocast][threads]") {
  // Autograd carries the state to its threads, but no region: what they kept would never be freed.
  const auto w = make_weight(4, 4);
  std::atomic<int> wrong = 0;
  run_threads(4, [&](int /*i*/) {
    const auto x = at::ones({4, 4}).requires_grad_();
    at::Tensor loss;
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      loss = at::mm(x, w).sum();
    }
    loss.backward();
    wrong += !at::equal(x.grad(), at::full({4, 4}, 4.0)) ? 1 : 0;
  });
  CHECK(wrong == 0);
  CHECK(at::equal(w.grad(), at::full({4, 4}, 16.0)));
}

TEST_CASE_METHOD(LeavesNoTrace, "threads: policies can be read and edited while others run ops",
                 "[autocast][threads]") {
  // mm has a kernel already: an edit of it registers nothing and needs no quiet.
  std::atomic<int> wrong = 0;
  Meeting meeting(4);
  run_threads(4, [&](int i) {
    const auto x = at::ones({2, 2});
    meeting.wait();
    for (int round = 0; round < 200; ++round) {
      if (i == 0) {
        fastamp::set_op_policy(
            "mm", round % 2 == 0 ? fastamp::OpPolicy::kFp32 : fastamp::OpPolicy::kLower);
      } else if (i == 1) {
        wrong += fastamp::op_table().empty() ? 1 : 0;
      } else {
        const AutocastGuard region(c10::kCPU, c10::kBFloat16);
        const auto dtype = at::mm(x, x).scalar_type();
        wrong += dtype != c10::kFloat && dtype != c10::kBFloat16 ? 1 : 0;
      }
    }
  });
  CHECK(wrong == 0);
  fastamp::reset_op_policies();
}
