// SPDX-License-Identifier: Apache-2.0
// Guards that end in another order than they began, on other threads, early, or beside Python-like
// owners.

#include "autocast/region.h"
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::op_policy;
using fastamp::OpPolicy;
using fastamp::OpPolicyGuard;
using namespace fastamp::test;

namespace {

c10::ScalarType mm_dtype() {
  const auto x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

/// Gives warnings that torch gives once per process every time.
class WarnAlways {
 public:
  WarnAlways() { c10::WarningUtils::set_warnAlways(true); }
  ~WarnAlways() { c10::WarningUtils::set_warnAlways(false); }
  WarnAlways(const WarnAlways&) = delete;
  WarnAlways& operator=(const WarnAlways&) = delete;
};

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: the first to be destroyed may be the outermost",
                 "[autocast][guard]") {
  std::vector<std::unique_ptr<AutocastGuard>> guards;
  guards.push_back(std::make_unique<AutocastGuard>(c10::kCPU, c10::kBFloat16));
  guards.push_back(std::make_unique<AutocastGuard>(c10::kCPU, c10::kHalf));
  guards.front().reset();
  CHECK(mm_dtype() == c10::kHalf);
  guards.clear();
  CHECK(mm_dtype() == c10::kFloat);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: guards end in every order", "[autocast][guard]") {
  std::array<int, 4> order{0, 1, 2, 3};
  do {
    std::array<std::optional<AutocastGuard>, 4> guards;
    guards[0].emplace(c10::kCPU, c10::kBFloat16);
    guards[1].emplace(c10::kCPU, c10::kHalf, true, false);
    guards[2].emplace(c10::kCPU, std::nullopt, false);
    guards[3].emplace(c10::kCPU, c10::kBFloat16, true, true);
    for (const int i : order) {
      CHECK(public_state().cpu_enabled == (guards[3] ? true : !guards[2].has_value()));
      guards[static_cast<std::size_t>(i)].reset();
    }
    CHECK(public_state() == PublicState{false, false, c10::kBFloat16, c10::kHalf, true, 0});
  } while (std::ranges::next_permutation(order).found);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: regions of Python's kind stand on the same stack",
                 "[autocast][guard]") {
  int owner = 0;
  const fastamp::autocast::AutocastState half{c10::kCPU, c10::kHalf, true, true};
  std::optional<AutocastGuard> guard(std::in_place, c10::kCPU, c10::kBFloat16);
  fastamp::autocast::enter_region(half, &owner);
  guard.reset();
  CHECK(mm_dtype() == c10::kHalf);
  CHECK(fastamp::autocast::exit_region_of(&owner).found);
  CHECK_FALSE(fastamp::autocast::exit_region_of(&owner).found);
  CHECK(mm_dtype() == c10::kFloat);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: destroyed on another thread it changes nothing",
                 "[autocast][guard]") {
  auto guard = std::make_unique<AutocastGuard>(c10::kCPU, c10::kBFloat16);
  const auto inside = public_state();
  const WarnAlways all;
  std::optional<c10::ScalarType> of_the_other;
  std::optional<PublicState> left_there;
  bool warned = false;
  std::thread([&] {
    const CapturedWarnings warnings;
    {
      const AutocastGuard own(c10::kCPU, c10::kHalf);
      guard.reset();
      of_the_other = mm_dtype();
    }
    left_there = public_state();
    warned = warnings.has("AutocastGuard: expected to be ended on the thread that made it");
  }).join();
  CHECK(warned);
  CHECK(of_the_other == c10::kHalf);
  CHECK_FALSE(left_there->cpu_enabled);
  CHECK(left_there->depth == 0);
  CHECK(public_state() == inside);
  // The region is still open and has no owner, as after a leaked guard.
  set_enabled(c10::kCPU, false);
  decrement_nesting();
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: a thread's regions end with it",
                 "[autocast][guard]") {
  std::unique_ptr<AutocastGuard> guard;
  std::thread([&] { guard = std::make_unique<AutocastGuard>(c10::kCPU, c10::kHalf); }).join();
  const CapturedWarnings warnings;
  const AutocastGuard own(c10::kCPU, c10::kBFloat16);
  guard.reset();
  CHECK(mm_dtype() == c10::kBFloat16);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: ends early, once", "[autocast][guard]") {
  AutocastGuard outer(c10::Device(c10::kCPU), c10::kBFloat16);
  AutocastGuard inner(c10::Device("cpu"), c10::kHalf);
  CHECK(inner.enabled());
  CHECK(inner.dtype() == c10::kHalf);
  CHECK(inner.device_type() == c10::kCPU);
  inner.release();
  CHECK(mm_dtype() == c10::kBFloat16);
  inner.release();
  CHECK(mm_dtype() == c10::kBFloat16);
  outer.release();
  CHECK(mm_dtype() == c10::kFloat);
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: says whether it could be had",
                 "[autocast][guard]") {
  const CapturedWarnings warnings;
  const AutocastGuard refused(c10::kCPU, c10::kFloat);
  CHECK_FALSE(refused.enabled());
  CHECK(warnings.texts().size() == 1);
  const AutocastGuard off(c10::kCPU, c10::kHalf, false);
  CHECK_FALSE(off.enabled());
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: casts live until the last region of fastamp",
                 "[autocast][guard][cast_cache]") {
  const auto weight = make_weight(2, 2);
  std::optional<AutocastGuard> first(std::in_place, c10::kCPU, c10::kBFloat16);
  std::optional<AutocastGuard> second(std::in_place, c10::kCPU, c10::kBFloat16);
  const float sum = first_sum(weight);
  first.reset();
  edit_behind(weight, 1);
  CHECK(first_sum(weight) == sum);
  second.reset();
  const AutocastGuard next(c10::kCPU, c10::kBFloat16);
  CHECK(first_sum(weight) != sum);
}

TEST_CASE_METHOD(LeavesNoTrace, "OpPolicyGuard: guards end in any order, and early",
                 "[autocast][policy]") {
  std::optional<OpPolicyGuard> outer(std::in_place,
                                     std::vector<fastamp::OpPolicyEdit>{{"mm", OpPolicy::kFp32}});
  OpPolicyGuard middle({{"mm", OpPolicy::kBanned}, {"exp", OpPolicy::kBanned}});
  std::optional<OpPolicyGuard> inner(std::in_place,
                                     std::vector<fastamp::OpPolicyEdit>{{"exp", OpPolicy::kLower}});
  outer.reset();
  CHECK(op_policy("mm", c10::kCPU) == OpPolicy::kBanned);
  CHECK(op_policy("exp", c10::kCPU) == OpPolicy::kLower);
  middle.release();
  middle.release();
  CHECK(op_policy("mm", c10::kCPU) == OpPolicy::kLower);
  CHECK(op_policy("exp", c10::kCPU) == OpPolicy::kLower);
  inner.reset();
  CHECK(op_policy("exp", c10::kCPU) == OpPolicy::kPass);
}

TEST_CASE_METHOD(LeavesNoTrace, "OpPolicyGuard: destroyed on another thread it changes nothing",
                 "[autocast][policy]") {
  std::optional<OpPolicy> of_the_other;
  std::optional<OpPolicy> left_there;
  std::optional<OpPolicy> of_this;
  std::thread([&] {
    auto guard = std::make_unique<OpPolicyGuard>(
        std::vector<fastamp::OpPolicyEdit>{{"mm", OpPolicy::kFp32}});
    std::thread([&] {
      const CapturedWarnings warnings;
      {
        const OpPolicyGuard own({{"mm", OpPolicy::kBanned}});
        guard.reset();
        of_the_other = op_policy("mm", c10::kCPU);
      }
      left_there = op_policy("mm", c10::kCPU);
    }).join();
    of_this = op_policy("mm", c10::kCPU);
  }).join();
  CHECK(of_the_other == OpPolicy::kBanned);
  CHECK(left_there == OpPolicy::kLower);
  CHECK(of_this == OpPolicy::kFp32);
}
