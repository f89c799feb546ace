// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy.h>

#include <ATen/CachedTensorUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/ones.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/modules/linear.h>

#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <vector>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

/// Expires when the cast of `weight` that the thread keeps is gone.
NodeWatch watch_cast(const at::Tensor& weight) {
  return NodeWatch(node_of_argument(column_sums(weight), 1));
}

/// The memory that the process has now.
std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t all = 0;
  std::int64_t resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: casts live until the outermost region ends",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  NodeWatch cast;
  {
    const AutocastGuard outer(c10::kCPU, c10::kBFloat16);
    {
      const AutocastGuard inner(c10::kCPU, c10::kBFloat16);
      cast = watch_cast(w);
    }
    CHECK_FALSE(cast.expired());
    {
      const AutocastGuard off(c10::kCPU, std::nullopt, false);
    }
    CHECK_FALSE(cast.expired());
    CHECK(watch_cast(w) == cast);
  }
  CHECK(cast.expired());
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: an exception that leaves the outermost region frees the casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  NodeWatch cast;
  try {
    const AutocastGuard outer(c10::kCPU, c10::kBFloat16);
    const AutocastGuard inner(c10::kCPU, c10::kHalf);
    cast = watch_cast(w);
    throw std::runtime_error("leaves");
  } catch (const std::runtime_error&) {
  }
  CHECK(cast.expired());
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: an exception inside an inner region keeps the outer region's casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard outer(c10::kCPU, c10::kBFloat16);
  const auto cast = watch_cast(w);
  try {
    const AutocastGuard inner(c10::kCPU, c10::kHalf);
    throw std::runtime_error("leaves");
  } catch (const std::runtime_error&) {
  }
  CHECK(watch_cast(w) == cast);
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: the next region casts anew", "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    CHECK(first_sum(w) == 4.0F);
  }
  edit_behind(w, 1.0);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 8.0F);
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: does not keep the weight itself alive",
                 "[autocast][cache]") {
  auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  // Without gradients: the autograd graph of a cast would hold the weight.
  {
    const at::NoGradGuard no_grad;
    column_sums(w);
  }
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(w.storage().unsafeGetStorageImpl()));
  w = at::Tensor();
  CHECK(storage.expired());
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: casts of dropped models do not add up in a region",
                 "[autocast][cache]") {
  const bool gradients = GENERATE(true, false);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const at::AutoGradMode mode(gradients);
  const auto input = at::ones({1, 1024});
  const auto use = [&] { torch::nn::Linear(1024, 1024)->forward(input); };
  use();
  const auto before = resident_bytes();
  for (int i = 0; i < 40; ++i) {
    use();
  }
  CHECK(resident_bytes() - before < 30'000'000);  // A cast has 2 MB, a weight 4.
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: a new weight in a freed weight's place gets its own cast",
                 "[autocast][cache]") {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  int wrong = 0;
  for (int i = 0; i < 500; ++i) {
    const auto w = make_weight(8, 8, i % 16);
    const at::NoGradGuard no_grad;
    wrong += first_sum(w) != static_cast<float>(8 * (i % 16)) ? 1 : 0;
  }
  CHECK(wrong == 0);
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a cast that the user edits in place is not used again",
                 "[autocast][cache]") {
  // einsum of one operand hands out a view of the cast.
  fastamp::set_op_policy("einsum", fastamp::OpPolicy::kLower, c10::kCPU);
  const auto w = make_weight(4, 4);
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    const at::NoGradGuard no_grad;
    auto view = at::einsum("ij->ji", {w});
    REQUIRE(view.scalar_type() == c10::kBFloat16);
    view.add_(1);
    CHECK(first_sum(w) == 4.0F);
    CHECK(at::einsum("ij->ji", {w}).select(0, 0).sum().item<float>() == 4.0F);
  }
  fastamp::reset_op_policies();
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: tensors owned by CUDA-graph trees are not kept",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  at::caching::set_cached_tensors_enabled(true);
  at::caching::add_cached_tensor(w);
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    CHECK_FALSE(is_cast_kept(w));
  }
  at::caching::remove_cached_tensor(w);
  at::caching::set_cached_tensors_enabled(false);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: regions that end in another order than they began free the casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  auto first = std::make_unique<AutocastGuard>(c10::kCPU, c10::kBFloat16);
  auto second = std::make_unique<AutocastGuard>(c10::kCPU, c10::kBFloat16);
  const auto cast = watch_cast(w);
  first.reset();
  CHECK_FALSE(cast.expired());
  second.reset();
  CHECK(cast.expired());
  set_enabled(c10::kCPU, false);
}
