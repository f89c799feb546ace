// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>

#include <ATen/ops/ones.h>

#include <memory>
#include <optional>

using fastamp::AutocastGuard;
using namespace fastamp::test;

// Of regions that are not fastamp's, only torch's own cache shows when they end.

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a hand-written region keeps casts, and ends them",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  {
    const HandRegion region(c10::kCPU, c10::kBFloat16);
    const auto first = column_sums(w);
    CHECK(node_of_argument(first, 1) == node_of_argument(column_sums(w), 1));
    edit_behind(w, 1.0);
    CHECK(first_sum(w) == 4.0F);
  }
  const HandRegion region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 8.0F);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: clearing torch's cache inside a hand-written region drops the casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const HandRegion region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 4.0F);
  edit_behind(w, 1.0);
  clear_torch_cache();
  CHECK(first_sum(w) == 8.0F);
  CHECK(is_cast_kept(w));
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: autocast switched on by hand without a region keeps no casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  set_enabled(c10::kCPU, true);
  CHECK_FALSE(is_cast_kept(w));
  set_enabled(c10::kCPU, false);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: a guard inside a hand-written region leaves it its casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  {
    const HandRegion by_hand(c10::kCPU, c10::kBFloat16);
    const auto before = node_of_argument(column_sums(w), 1);
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      CHECK(node_of_argument(column_sums(w), 1) == before);
    }
    CHECK(node_of_argument(column_sums(w), 1) == before);
    edit_behind(w, 1.0);
  }
  const HandRegion by_hand(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 8.0F);
}

TEST_CASE_METHOD(
    LeavesNoTrace,
    "cast cache: a hand-written region that outlives the outermost guard ends the casts",
    "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  auto guard = std::make_unique<AutocastGuard>(c10::kCPU, c10::kBFloat16);
  NodeWatch cast;
  {
    std::optional<HandRegion> by_hand(std::in_place, c10::kCPU, c10::kBFloat16);
    guard.reset();
    set_enabled(c10::kCPU, true);
    cast = NodeWatch(node_of_argument(column_sums(w), 1));
    by_hand.reset();
    set_enabled(c10::kCPU, false);
  }
  edit_behind(w, 1.0);
  {
    const HandRegion next(c10::kCPU, c10::kBFloat16);
    CHECK(first_sum(w) == 8.0F);
  }
  CHECK(cast.expired());
}

TEST_CASE_METHOD(LeavesNoTrace, "cast cache: a guard after a hand-written region starts empty",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  {
    const HandRegion by_hand(c10::kCPU, c10::kBFloat16);
    CHECK(first_sum(w) == 4.0F);
  }
  edit_behind(w, 1.0);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(w) == 8.0F);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: a hand-written region without the cache flag keeps no casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  set_cache_enabled(false);
  {
    const HandRegion by_hand(c10::kCPU, c10::kBFloat16);
    CHECK_FALSE(is_cast_kept(w));
  }
  set_cache_enabled(true);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "cast cache: a hand-written region for CUDA alone does not disturb CPU casts",
                 "[autocast][cache]") {
  const auto w = make_weight(4, 4);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto before = node_of_argument(column_sums(w), 1);
  {
    const HandRegion cuda(c10::kCUDA, c10::kHalf);
    CHECK(node_of_argument(column_sums(w), 1) == before);
  }
  CHECK(node_of_argument(column_sums(w), 1) == before);
}
