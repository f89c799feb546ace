// SPDX-License-Identifier: Apache-2.0
// OpPolicyGuard and register_op.

#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/registration.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <optional>
#include <thread>

using fastamp::AutocastGuard;
using fastamp::op_policy;
using fastamp::OpPolicy;
using fastamp::OpPolicyGuard;

namespace {

c10::ScalarType mm_dtype() {
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

}  // namespace

TEST_CASE("A policy guard acts on its thread until it is destroyed") {
  const auto before = fastamp::op_policy("mm", c10::kCPU);
  {
    const OpPolicyGuard outer({{"mm", OpPolicy::kFp32}, {"exp", OpPolicy::kBanned, c10::kCUDA}});
    CHECK(mm_dtype() == c10::kFloat);
    CHECK(op_policy("exp", c10::kCUDA) == OpPolicy::kBanned);
    CHECK(op_policy("exp", c10::kCPU) == OpPolicy::kPass);
    {
      const OpPolicyGuard inner({{"mm", OpPolicy::kPass}});
      CHECK(op_policy("mm", c10::kCPU) == OpPolicy::kPass);
      CHECK(op_policy("exp", c10::kCUDA) == OpPolicy::kBanned);
    }
    CHECK(mm_dtype() == c10::kFloat);
    std::optional<c10::ScalarType> elsewhere;
    std::thread([&] { elsewhere = mm_dtype(); }).join();
    CHECK(elsewhere == c10::kBFloat16);
    CHECK_THROWS_AS(fastamp::unregister_kernels(), c10::Error);
  }
  CHECK(op_policy("mm", c10::kCPU) == before);
  CHECK(mm_dtype() == c10::kBFloat16);
}

TEST_CASE("A refused policy guard changes nothing") {
  CHECK_THROWS_AS(OpPolicyGuard({{"mm", OpPolicy::kFp32}, {"mmm", OpPolicy::kFp32}}),
                  c10::ValueError);
  CHECK_THROWS_WITH(OpPolicyGuard({{"mmm", OpPolicy::kFp32}}),
                    Catch::StartsWith("OpPolicyGuard: expected op "));
  CHECK_THROWS_AS(OpPolicyGuard({{"mm", OpPolicy::kAppendDtype}}), c10::ValueError);
  CHECK_THROWS_AS(OpPolicyGuard({{"mm", OpPolicy::kFp32, c10::kXLA}}), c10::ValueError);
  CHECK(mm_dtype() == c10::kBFloat16);
}

TEST_CASE("A registered op is autocast, edited and given back") {
  const auto dtype = [] {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    return at::nan_to_num(at::ones({2})).scalar_type();
  };
  CHECK(dtype() == c10::kFloat);
  fastamp::register_op("aten::nan_to_num", OpPolicy::kLower, c10::kCPU);
  CHECK(dtype() == c10::kBFloat16);
  CHECK(fastamp::op_table().back().op == "nan_to_num");
  {
    const OpPolicyGuard guard({{"nan_to_num", OpPolicy::kFp32}});
    CHECK(dtype() == c10::kFloat);
  }
  fastamp::set_op_policy("nan_to_num", OpPolicy::kPass);
  CHECK(dtype() == c10::kFloat);
  fastamp::reset_op_policies();
  CHECK(dtype() == c10::kBFloat16);
  fastamp::unregister_op("nan_to_num");
  CHECK(dtype() == c10::kFloat);
  CHECK_THROWS_AS(fastamp::unregister_op("nan_to_num"), c10::ValueError);
  CHECK_THROWS_AS(fastamp::register_op("aten::nothing_like_it", OpPolicy::kLower), c10::ValueError);
  CHECK_THROWS_AS(fastamp::register_op("aten::mm", OpPolicy::kLower), c10::ValueError);
}
