// SPDX-License-Identifier: Apache-2.0
#include "autocast/kept_casts.h"
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/optim/sgd.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include <optional>

using fastamp::AutocastGuard;
using fastamp::KeepCastsGuard;
using fastamp::kept_casts;
using namespace fastamp::test;

namespace {

/// A region of its own per use.
float sum_in_region(const at::Tensor& weight) {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  return first_sum(weight);
}

fastamp::CastCounts casts_of_a_region(const at::Tensor& weight) {
  const fastamp::Trace trace;
  sum_in_region(weight);
  return trace.totals();
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard: a weight is cast once for all regions",
                 "[autocast][kept]") {
  auto weight = make_weight(4, 2);
  const bool requires_grad = GENERATE(true, false);
  weight.requires_grad_(requires_grad);
  {
    const KeepCastsGuard keep({weight});
    CHECK(casts_of_a_region(weight).kept_hits == 0);
    const auto second = casts_of_a_region(weight);
    CHECK(second.kept_hits == 1);
    CHECK(second.weight_casts == 0);
    CHECK(kept_casts().copies == 1);
    CHECK(kept_casts().bytes == 4 * 2 * 2);
  }
  CHECK(kept_casts().copies == 0);
  CHECK(casts_of_a_region(weight).kept_hits == 0);
}

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard: an edit is seen, one through data() is not",
                 "[autocast][kept]") {
  const auto weight = make_weight(4, 2);
  const KeepCastsGuard keep({weight});
  CHECK(sum_in_region(weight) == 4);
  {
    const at::NoGradGuard no_grad;
    weight.fill_(2);
  }
  CHECK(sum_in_region(weight) == 8);
  edit_behind(weight, 1);
  CHECK(sum_in_region(weight) == 8);
  fastamp::drop_kept_casts({weight});
  CHECK(sum_in_region(weight) == 12);
  edit_behind(weight, 1);
  fastamp::drop_kept_casts();
  CHECK(sum_in_region(weight) == 16);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "KeepCastsGuard: steps of LibTorch's optimizers are not seen, fastamp's are",
                 "[autocast][kept]") {
  const auto weight = make_weight(4, 2);
  const KeepCastsGuard keep({weight});
  weight.mutable_grad() = at::ones({4, 2});
  CHECK(sum_in_region(weight) == 4.0F);
  torch::optim::SGD({weight}, torch::optim::SGDOptions(1.0)).step();  // It writes weight.data().
  CHECK(weight[0][0].item<float>() == 0.0F);
  CHECK(sum_in_region(weight) == 4.0F);
  fastamp::drop_kept_casts();
  CHECK(sum_in_region(weight) == 0.0F);
  fastamp::optim::SGD({weight}, fastamp::optim::SGDOptions(1.0)).step();
  CHECK(sum_in_region(weight) == -4.0F);
}

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard: every region has its own node",
                 "[autocast][kept]") {
  const auto weight = make_weight(4, 2);
  const KeepCastsGuard keep({weight});
  std::optional<AutocastGuard> region(std::in_place, c10::kCPU, c10::kBFloat16);
  const auto first = column_sums(weight);
  region.reset();
  region.emplace(c10::kCPU, c10::kBFloat16);
  const auto second = column_sums(weight);
  region.reset();
  CHECK(node_of_argument(first, 1) != node_of_argument(second, 1));
  first.sum().backward();
  second.sum().backward();
  CHECK(weight.grad().sum().item<float>() == 16);
}

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard: release, and the last of two",
                 "[autocast][kept]") {
  const auto weight = make_weight(4, 2);
  KeepCastsGuard first({weight});
  KeepCastsGuard second({weight, weight});
  sum_in_region(weight);
  first.release();
  first.release();
  CHECK(kept_casts().copies == 1);
  second.release();
  CHECK(kept_casts().copies == 0);
}

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard: a dead weight's copy is freed within 16 regions",
                 "[autocast][kept]") {
  auto weight = make_weight(4, 2);
  const KeepCastsGuard keep({weight});
  sum_in_region(weight);
  const auto memory = fastamp::autocast::KeptCastStore::instance()
                          .find_memory(weight, c10::kBFloat16)
                          .storage()
                          .getWeakStorageImpl();
  CHECK_FALSE(memory.expired());
  weight = at::Tensor();
  const auto other = make_weight(2, 2);
  for (int i = 0; i < 16; ++i) {
    sum_in_region(other);
  }
  CHECK(memory.expired());
  CHECK(kept_casts().copies == 0);
}

TEST_CASE_METHOD(LeavesNoTrace, "KeepCastsGuard: undefined tensors are ignored",
                 "[autocast][kept]") {
  const KeepCastsGuard keep({at::Tensor(), make_weight(2, 2)});
  CHECK(kept_casts().copies == 0);
}
