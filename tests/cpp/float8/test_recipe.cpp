// SPDX-License-Identifier: Apache-2.0
// Regions with an fp8 recipe, from C++.

#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/context.h>
#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/trace.h>

#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>

#include <string>
#include <thread>

using fastamp::AutocastGuard;
using fastamp::float8_recipe;
using fastamp::Float8Recipe;
using namespace fastamp::test;

namespace {

/// Whether the op of the call runs in fp8, or why not.
template <class Call>
std::string outcome_of(const Call& call) {
  fastamp::Trace trace;
  call();
  trace.stop();
  const auto rows = trace.rows();
  REQUIRE(rows.size() == 1);
  return rows[0].float8;
}

std::string outcome_of_linear() {
  const auto x = at::randn({4, 32});
  const auto weight = at::randn({16, 32}).requires_grad_();
  return outcome_of([&] { at::linear(x, weight); });
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: linear runs in fp8 until the region ends",
                 "[float8]") {
  CHECK_FALSE(float8_recipe(c10::kCPU).has_value());
  {
    AutocastGuard region(c10::kCPU, Float8Recipe().grad_dtype(c10::kFloat8_e4m3fn));
    CHECK(region.dtype() == c10::kBFloat16);
    REQUIRE(float8_recipe(c10::kCPU).has_value());
    CHECK(float8_recipe(c10::kCPU)->grad_dtype() == c10::kFloat8_e4m3fn);
    CHECK_FALSE(float8_recipe(c10::kCUDA).has_value());
    CHECK(outcome_of_linear() == "float8");
    region.release();
    CHECK_FALSE(float8_recipe(c10::kCPU).has_value());
  }
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(outcome_of_linear().empty());
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: what regions inside it do to the recipe", "[float8]") {
  const AutocastGuard outer(c10::kCPU, Float8Recipe());
  {
    const AutocastGuard keeps(c10::kCPU);
    CHECK(outcome_of_linear() == "float8");
    const AutocastGuard ends(c10::kCPU, c10::kBFloat16);
    CHECK(outcome_of_linear().empty());
    const AutocastGuard still_ended(c10::kCPU);
    CHECK(outcome_of_linear().empty());
  }
  CHECK(outcome_of_linear() == "float8");
  {
    const AutocastGuard off(c10::kCPU, std::nullopt, false);
    CHECK_FALSE(float8_recipe(c10::kCPU).has_value());
    const AutocastGuard on(c10::kCPU);
    CHECK(outcome_of_linear() == "float8");
  }
  {
    const HandRegion suspends(c10::kCPU, c10::kHalf);
    CHECK(outcome_of_linear().empty());
    CHECK_FALSE(float8_recipe(c10::kCPU).has_value());
    const HandRegion resumes(c10::kCPU, c10::kBFloat16);
    CHECK(outcome_of_linear() == "float8");
  }
  {
    const AutocastGuard half(c10::kCPU, Float8Recipe(), c10::kHalf);
    CHECK(outcome_of_linear() == "float8");
    CHECK(at::linear(at::randn({4, 32}), at::randn({16, 32})).scalar_type() == c10::kHalf);
  }
  CHECK(outcome_of_linear() == "float8");
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: may end in any order", "[float8]") {
  AutocastGuard first(c10::kCPU, Float8Recipe().grad_dtype(c10::kFloat8_e4m3fn));
  AutocastGuard second(c10::kCPU, c10::kBFloat16);
  AutocastGuard third(c10::kCPU, Float8Recipe());
  first.release();
  CHECK(float8_recipe(c10::kCPU)->grad_dtype() == c10::kFloat8_e5m2);
  third.release();
  CHECK_FALSE(float8_recipe(c10::kCPU).has_value());
  second.release();
  CHECK_FALSE(float8_recipe(c10::kCPU).has_value());
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: another thread has none, but can be given it",
                 "[float8]") {
  const AutocastGuard region(c10::kCPU, Float8Recipe());
  const auto context = fastamp::AutocastContext::current();
  bool alone = true;
  bool given = false;
  bool after = true;
  std::thread([&] {
    alone = float8_recipe(c10::kCPU).has_value();
    {
      const fastamp::AutocastContextGuard as_in_region(context);
      given = float8_recipe(c10::kCPU).has_value();
    }
    after = float8_recipe(c10::kCPU).has_value();
  }).join();
  CHECK_FALSE(alone);
  CHECK(given);
  CHECK_FALSE(after);
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: mm, addmm and matmul with a weight or its transpose",
                 "[float8]") {
  at::manual_seed(0);
  const auto x = at::randn({7, 32});
  const auto weight = at::randn({16, 32}).requires_grad_();
  const auto flat = weight.detach().t().contiguous().requires_grad_();
  const auto bias = at::randn({16}).requires_grad_();
  const AutocastGuard region(c10::kCPU, Float8Recipe());
  const auto expected = at::linear(x, weight);
  const auto with_bias = at::linear(x, weight, bias);
  CHECK(outcome_of([&] { CHECK(bit_equal(at::mm(x, weight.t()), expected)); }) == "float8");
  CHECK(outcome_of([&] { CHECK(bit_equal(at::mm(x, flat), expected)); }) == "float8");
  CHECK(outcome_of([&] { CHECK(bit_equal(at::matmul(x, weight.t()), expected)); }) == "float8");
  CHECK(outcome_of([&] { CHECK(bit_equal(at::addmm(bias, x, weight.t()), with_bias)); }) ==
        "float8");
  CHECK(outcome_of([&] { at::addmm(bias, x, flat, 1, 2); }) == "not x times a weight");
  CHECK(outcome_of([&] { at::mm(x, at::randn({32, 16})); }) == "second operand is no weight");
  const auto stack = at::randn({2, 3, 7, 32});
  CHECK(bit_equal(at::matmul(stack, flat), at::linear(stack, weight)));
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: excluded weights stay in the base dtype", "[float8]") {
  const auto x = at::randn({4, 32});
  const auto weight = at::randn({16, 32}).requires_grad_();
  const auto linear = [&] { at::linear(x, weight); };
  const AutocastGuard region(c10::kCPU, Float8Recipe());
  {
    fastamp::Float8ExclusionGuard outer({weight});
    {
      const fastamp::Float8ExclusionGuard inner({weight, x});
      CHECK(outcome_of(linear) == "excluded");
    }
    CHECK(outcome_of(linear) == "excluded");
    CHECK(outcome_of([&] { at::mm(x, weight.t()); }) == "excluded");
    outer.release();
    outer.release();
    CHECK(outcome_of(linear) == "float8");
  }
  CHECK(outcome_of(linear) == "float8");
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: impossible recipes are refused", "[float8]") {
  const auto refusal = [](const Float8Recipe& recipe, c10::ScalarType dtype) {
    return error_text<c10::ValueError>(
        [&] { const AutocastGuard region(c10::kCPU, recipe, dtype); });
  };
  using Catch::Matchers::Contains;
  CHECK_THAT(refusal(Float8Recipe().grad_dtype(c10::kHalf), c10::kBFloat16),
             Contains("AutocastGuard: expected grad_dtype of the recipe to be float8_e4m3fn or "
                      "float8_e5m2, got Half"));
  CHECK_THAT(refusal(Float8Recipe().forward_dtype(c10::kFloat8_e5m2), c10::kBFloat16),
             Contains("got float8_e5m2 for both"));
  CHECK_THAT(refusal(Float8Recipe().ops({"mm", "bmm"}), c10::kBFloat16), Contains("got 'bmm'"));
  CHECK_THAT(refusal(Float8Recipe(), c10::kFloat), Contains("got Float"));
  CHECK_THAT(
      error_text<c10::ValueError>([] { const AutocastGuard region(c10::kXPU, Float8Recipe()); }),
      Contains("to be cpu or cuda, got xpu"));
  CHECK_THAT(error_text<c10::ValueError>(
                 [] { const AutocastGuard region(c10::kCUDA, c10::kFloat8_e5m2); }),
             Contains("got Float8_e5m2. Give other formats to a recipe"));
  CHECK_FALSE(float8_recipe(c10::kCPU).has_value());
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: a float8 dtype means bfloat16 and a default recipe",
                 "[float8]") {
  const CapturedWarnings warnings;  // There may be no GPU.
  const AutocastGuard region(c10::kCUDA, c10::kFloat8_e4m3fn);
  CHECK(region.dtype() == c10::kBFloat16);
}
