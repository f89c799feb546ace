// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <memory>
#include <stdexcept>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

/// Dtype that a lower-precision op gives now.
c10::ScalarType mm_dtype() {
  const auto x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: torch's public state shows the truth inside and after",
                 "[autocast][guard]") {
  const auto before = public_state();
  {
    const AutocastGuard region(c10::kCPU, c10::kHalf, true, false);
    auto expected = before;
    expected.cpu_enabled = true;
    expected.cpu_dtype = c10::kHalf;
    expected.cache_enabled = false;
    expected.depth = 1;
    CHECK(public_state() == expected);
  }
  CHECK(public_state() == before);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: without a dtype takes the device's current one",
                 "[autocast][guard]") {
  CHECK(public_state().cpu_dtype == c10::kBFloat16);
  {
    const AutocastGuard region(c10::kCPU);
    CHECK(mm_dtype() == c10::kBFloat16);
    const AutocastGuard half(c10::kCPU, c10::kHalf);
    const AutocastGuard inherits(c10::kCPU);
    CHECK(mm_dtype() == c10::kHalf);
  }
  set_dtype(c10::kCPU, c10::kHalf);
  {
    const AutocastGuard region(c10::kCPU);
    CHECK(mm_dtype() == c10::kHalf);
  }
  set_dtype(c10::kCPU, c10::kBFloat16);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: nests in any order of dtype, enabled and cache flag",
                 "[autocast][guard]") {
  const AutocastGuard outer(c10::kCPU, c10::kBFloat16, true, false);
  CHECK(mm_dtype() == c10::kBFloat16);
  {
    const AutocastGuard other_dtype(c10::kCPU, c10::kHalf);
    CHECK(mm_dtype() == c10::kHalf);
    CHECK_FALSE(public_state().cache_enabled);  // inherited
    {
      const AutocastGuard off(c10::kCPU, std::nullopt, false, true);
      CHECK(mm_dtype() == c10::kFloat);
      CHECK(public_state().cache_enabled);
      const AutocastGuard on(c10::kCPU, c10::kBFloat16);
      CHECK(mm_dtype() == c10::kBFloat16);
      CHECK(public_state().depth == 4);
    }
    CHECK_FALSE(public_state().cache_enabled);
    CHECK(mm_dtype() == c10::kHalf);
  }
  CHECK(mm_dtype() == c10::kBFloat16);
  CHECK(public_state().depth == 1);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: an exception ends the regions it passes through",
                 "[autocast][guard]") {
  const AutocastGuard outer(c10::kCPU, c10::kBFloat16);
  const auto before = public_state();
  const auto fail_inside = [] {
    const AutocastGuard inner(c10::kCPU, c10::kHalf, true, false);
    const AutocastGuard innermost(c10::kCPU, std::nullopt, false);
    const auto x = at::ones({2, 3});
    at::mm(x, x);  // shapes do not fit
  };
  CHECK_THROWS_AS(fail_inside(), c10::Error);
  CHECK(public_state() == before);
  CHECK(mm_dtype() == c10::kBFloat16);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: an op that throws leaves autocast switched on",
                 "[autocast][guard]") {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto x = at::ones({2, 3});
  CHECK_THROWS_AS(at::mm(x, x), c10::Error);
  CHECK(mm_dtype() == c10::kBFloat16);
}

namespace {

void recurse(int levels) {
  const auto before = public_state();
  const auto dtype = levels % 2 == 0 ? c10::kHalf : c10::kBFloat16;
  {
    const AutocastGuard region(c10::kCPU, dtype, levels % 3 != 0);
    CHECK(mm_dtype() == (levels % 3 != 0 ? dtype : c10::kFloat));
    if (levels > 0) {
      recurse(levels - 1);
    }
    CHECK(mm_dtype() == (levels % 3 != 0 ? dtype : c10::kFloat));
  }
  CHECK(public_state() == before);
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: a function that opens a region may call itself",
                 "[autocast][guard]") {
  recurse(50);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: mixes with regions that C++ programs write by hand",
                 "[autocast][guard]") {
  SECTION("guard inside") {
    const HandRegion by_hand(c10::kCPU, c10::kHalf);
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      CHECK(mm_dtype() == c10::kBFloat16);
      CHECK(public_state().depth == 2);
    }
    CHECK(mm_dtype() == c10::kHalf);
  }
  SECTION("guard outside") {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    {
      const HandRegion by_hand(c10::kCPU, c10::kHalf, false);
      CHECK(mm_dtype() == c10::kFloat);
    }
    CHECK(mm_dtype() == c10::kBFloat16);
  }
  SECTION("switched on by hand without a region, as the oldest programs do") {
    set_enabled(c10::kCPU, true);
    CHECK(mm_dtype() == c10::kBFloat16);
    {
      const AutocastGuard off(c10::kCPU, std::nullopt, false);
    }
    CHECK(public_state().cpu_enabled);
    CHECK(mm_dtype() == c10::kBFloat16);
    set_enabled(c10::kCPU, false);
  }
  SECTION("state changed by hand inside a region is undone at its end") {
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      set_enabled(c10::kCPU, false);
      set_dtype(c10::kCPU, c10::kHalf);
      set_cache_enabled(false);
      CHECK(mm_dtype() == c10::kFloat);
    }
    CHECK_FALSE(public_state().cpu_enabled);
    CHECK(public_state().cpu_dtype == c10::kBFloat16);
    CHECK(public_state().cache_enabled);
  }
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: a region of one device leaves the other's state alone",
                 "[autocast][guard]") {
  set_enabled(c10::kCUDA, true);
  set_dtype(c10::kCUDA, c10::kBFloat16);
  {
    const AutocastGuard region(c10::kCPU, c10::kHalf);
    CHECK(public_state().cuda_enabled);
    CHECK(public_state().cuda_dtype == c10::kBFloat16);
  }
  set_dtype(c10::kCUDA, c10::kHalf);
  set_enabled(c10::kCUDA, false);
  const AutocastGuard region(c10::kCPU);
  CHECK_FALSE(public_state().cuda_enabled);
}
