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
    const OpPolicyGuard outer({{"mm", OpPolicy::fp32}, {"exp", OpPolicy::banned, c10::kCUDA}});
    CHECK(mm_dtype() == c10::kFloat);
    CHECK(op_policy("exp", c10::kCUDA) == OpPolicy::banned);
    CHECK(op_policy("exp", c10::kCPU) == OpPolicy::pass);
    {
      const OpPolicyGuard inner({{"mm", OpPolicy::pass}});
      CHECK(op_policy("mm", c10::kCPU) == OpPolicy::pass);
      CHECK(op_policy("exp", c10::kCUDA) == OpPolicy::banned);
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
  CHECK_THROWS_AS(OpPolicyGuard({{"mm", OpPolicy::fp32}, {"mmm", OpPolicy::fp32}}),
                  c10::ValueError);
  CHECK_THROWS_WITH(OpPolicyGuard({{"mmm", OpPolicy::fp32}}),
                    Catch::StartsWith("OpPolicyGuard: expected op "));
  CHECK_THROWS_AS(OpPolicyGuard({{"mm", OpPolicy::append_dtype}}), c10::ValueError);
  CHECK_THROWS_AS(OpPolicyGuard({{"mm", OpPolicy::fp32, c10::kXLA}}), c10::ValueError);
  CHECK(mm_dtype() == c10::kBFloat16);
}

TEST_CASE("A registered op is autocast, edited and given back") {
  const auto dtype = [] {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    return at::nan_to_num(at::ones({2})).scalar_type();
  };
  CHECK(dtype() == c10::kFloat);
  fastamp::register_op("aten::nan_to_num", OpPolicy::lower, c10::kCPU);
  CHECK(dtype() == c10::kBFloat16);
  CHECK(fastamp::op_table().back().op == "nan_to_num");
  {
    const OpPolicyGuard guard({{"nan_to_num", OpPolicy::fp32}});
    CHECK(dtype() == c10::kFloat);
  }
  fastamp::set_op_policy("nan_to_num", OpPolicy::pass);
  CHECK(dtype() == c10::kFloat);
  fastamp::reset_op_policies();
  CHECK(dtype() == c10::kBFloat16);
  fastamp::unregister_op("nan_to_num");
  CHECK(dtype() == c10::kFloat);
  CHECK_THROWS_AS(fastamp::unregister_op("nan_to_num"), c10::ValueError);
  CHECK_THROWS_AS(fastamp::register_op("aten::nothing_like_it", OpPolicy::lower), c10::ValueError);
  CHECK_THROWS_AS(fastamp::register_op("aten::mm", OpPolicy::lower), c10::ValueError);
}
