// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/autocast/weights_changed.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::KeepCastsGuard;
using fastamp::kept_casts;
using fastamp::weights_changed;
using namespace fastamp::test;

// Values are small integers: a stale cast shows as a wrong whole number.

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: an open region casts these weights again",
                 "[autocast][cache]") {
  const auto changed = make_weight(4, 2);
  const auto other = make_weight(4, 2);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto before = column_sums(other);
  CHECK(first_sum(changed) == 4);
  edit_behind(changed, 1);
  CHECK(first_sum(changed) == 4);
  weights_changed({changed, at::Tensor()});
  CHECK(first_sum(changed) == 8);
  CHECK(is_cast_kept(changed));  // The new cast is.
  // Others are left alone: their gradients would else be summed in another order.
  CHECK(node_of_argument(before, 1) == node_of_argument(column_sums(other), 1));
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: products with a transposed weight, too",
                 "[autocast][cache]") {
  const auto weight = make_weight(2, 4);  // As LibTorch's Linear uses it.
  const auto sum = [&] { return first_sum(weight.t()); };
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(sum() == 4);
  edit_behind(weight, 1);
  CHECK(sum() == 4);
  weights_changed({weight});
  CHECK(sum() == 8);
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: in a region of torch's own, too",
                 "[autocast][cache]") {
  const auto weight = make_weight(4, 2);
  const HandRegion region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(weight) == 4);
  edit_behind(weight, 1);
  weights_changed({weight});
  CHECK(first_sum(weight) == 8);
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: kept casts are freed and made again",
                 "[autocast][kept]") {
  const auto weight = make_weight(4, 2);
  const auto other = make_weight(4, 2);
  const KeepCastsGuard keep({weight, other});
  const auto sum_in_region = [](const at::Tensor& used) {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    return first_sum(used);
  };
  CHECK(sum_in_region(weight) == 4);
  sum_in_region(other);
  edit_behind(weight, 1);
  CHECK(sum_in_region(weight) == 4);
  weights_changed({weight});
  CHECK(kept_casts().copies == 1);
  CHECK(sum_in_region(weight) == 8);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(weight) == 8);
  edit_behind(weight, 1);
  weights_changed({weight});
  CHECK(first_sum(weight) == 12);
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: all parameters of an optimizer",
                 "[autocast][cache]") {
  const auto weights = std::vector{make_weight(4, 2), make_weight(4, 2)};
  for (const auto& weight : weights) {
    weight.mutable_grad() = at::ones({4, 2});
  }
  torch::optim::SGD optimizer({weights[0]}, torch::optim::SGDOptions(1.0));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({weights[1]}));
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  for (const auto& weight : weights) {
    CHECK(first_sum(weight) == 4);
  }
  optimizer.step();
  weights_changed(optimizer);
  for (const auto& weight : weights) {
    CHECK(first_sum(weight) == 0);
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: moves no version, pending backward passes run",
                 "[autocast][cache]") {
  const auto weight = make_weight(4, 2);
  const auto x = at::ones({1, 4}).requires_grad_();
  const auto saved = x.mm(weight);  // In float32: the graph saved the weight itself.
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto cast = x.mm(weight);
  const auto version = weight._version();
  edit_behind(weight, 1);
  weights_changed({weight});
  CHECK(weight._version() == version);
  CHECK_NOTHROW(saved.sum().add(cast.sum()).backward());
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: regions that are open on other threads see it",
                 "[autocast][cache][threads]") {
  const auto changed = make_weight(4, 2);
  const auto other = make_weight(4, 2);
  std::atomic<int> stage{0};
  float sums[2] = {};
  bool other_kept = false;
  std::thread reader([&] {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    const auto before = column_sums(other);
    sums[0] = first_sum(changed);
    stage = 1;
    while (stage != 2) {
      std::this_thread::yield();
    }
    sums[1] = first_sum(changed);
    other_kept = before.grad_fn()->next_edge(1).function ==
                 column_sums(other).grad_fn()->next_edge(1).function;
  });
  while (stage != 1) {
    std::this_thread::yield();
  }
  edit_behind(changed, 1);
  weights_changed({changed});
  stage = 2;
  reader.join();
  CHECK(sums[0] == 4);
  CHECK(sums[1] == 8);
  CHECK(other_kept);
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: more than is remembered, every cast is made anew",
                 "[autocast][cache]") {
  const auto first = make_weight(4, 2);
  const std::vector<at::Tensor> others(1U << 14U, make_weight(4, 2));
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(first) == 4);
  edit_behind(first, 1);
  weights_changed({first});
  weights_changed(others);
  CHECK(first_sum(first) == 8);
  const auto node = node_of_argument(column_sums(first), 1);
  weights_changed(others);
  weights_changed({others[0]});
  CHECK_FALSE(node == node_of_argument(column_sums(first), 1));
}

TEST_CASE_METHOD(LeavesNoTrace, "weights_changed: outside regions, and of what is no weight",
                 "[autocast][cache]") {
  weights_changed(at::TensorList());
  weights_changed({at::Tensor(), at::ones({2}), make_weight(2, 2)});
  const auto weight = make_weight(4, 2);
  weights_changed({weight});
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(is_cast_kept(weight));
}
