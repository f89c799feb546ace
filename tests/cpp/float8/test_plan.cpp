// SPDX-License-Identifier: Apache-2.0
// Which products run in fp8 on a GPU, by the rule of their sizes, and plans made by it.

#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/float8_plan.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/trace.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>

#include <string>
#include <utility>

using fastamp::AutocastGuard;
using fastamp::float8_plan;
using fastamp::Float8Recipe;
using fastamp::Float8Shape;
using namespace fastamp::test;
using Catch::Matchers::Contains;

namespace {

constexpr const char* kSmall = "K and N within small_size";

std::string outcome_of(const at::Tensor& x, const at::Tensor& weight) {
  fastamp::Trace trace;
  at::linear(x, weight);
  trace.stop();
  REQUIRE(trace.rows().size() == 1);
  return trace.rows()[0].float8;
}

}  // namespace

TEST_CASE("fp8 plan: a row for each shape says what becomes of it", "[float8]") {
  const auto rows = float8_plan({{.m = 8192, .k = 4096, .n = 14336},
                                 {.m = 8192, .k = 4096, .n = 1024},
                                 {.m = 1, .k = 4112, .n = 16},
                                 {.m = 8192, .k = 4096, .n = 4104},
                                 {.m = 8192, .k = 4100, .n = 4096},
                                 {.m = 0, .k = 64, .n = 64},
                                 {.m = 8192, .k = 4096, .n = 4096, .x_dtype = c10::kDouble}});
  REQUIRE(rows.size() == 7);
  CHECK(rows[0].float8 == "float8");
  CHECK(rows[0].shape.n == 14336);
  CHECK(rows[1].float8 == kSmall);
  CHECK(rows[2].float8 == "float8");
  CHECK(rows[3].float8 == "K or N not a multiple of 16");
  CHECK(rows[4].float8 == "K or N not a multiple of 16");
  CHECK(rows[5].float8 == "empty");
  CHECK(rows[6].float8 == "dtype");
  CHECK(float8_plan({}).empty());
}

TEST_CASE("fp8 plan: backward keeps half of the bytes of a 16-bit region", "[float8]") {
  const auto saved = [](const Float8Shape& shape) {
    const auto row = float8_plan({shape}, Float8Recipe().small_size(0, 0))[0];
    return std::pair(row.base_dtype_saved_bytes, row.saved_bytes);
  };
  using Bytes = std::pair<std::int64_t, std::int64_t>;
  const Float8Shape both{.m = 32, .k = 48, .n = 64};
  CHECK(saved(both) == Bytes(2 * (32 * 48 + 64 * 48), 32 * 48 + 64 * 48 + 8));
  Float8Shape shape = both;
  shape.x_gradient = false;
  CHECK(saved(shape) == Bytes(2 * 32 * 48, 32 * 48 + 4));
  shape = both;
  shape.weight_gradient = false;
  CHECK(saved(shape) == Bytes(2 * 64 * 48, 64 * 48 + 4));
  shape = both;
  shape.weight_dtype = c10::kBFloat16;  // The parameter itself is kept, which costs nothing.
  CHECK(saved(shape) == Bytes(2 * 32 * 48, 32 * 48 + 64 * 48 + 8));
  shape = both;
  shape.m = 17;  // Padded to a multiple of 16.
  CHECK(saved(shape) == Bytes(2 * (17 * 48 + 64 * 48), 32 * 48 + 64 * 48 + 8));
  shape.k = 40;
  CHECK(saved(shape).first == saved(shape).second);
}

TEST_CASE("fp8 plan: what is asked wrongly is refused", "[float8]") {
  const auto refusal = [](const Float8Shape& shape, const Float8Recipe& recipe,
                          c10::ScalarType base_dtype) {
    return error_text<c10::ValueError>([&] { float8_plan({{}, shape}, recipe, base_dtype); });
  };
  CHECK_THAT(refusal({.m = -1}, {}, c10::kHalf),
             Contains("float8_plan: expected sizes of shapes[1] to be at least 0, got m -1"));
  CHECK_THAT(refusal({}, {}, c10::kFloat), Contains("got Float"));
  CHECK_THAT(refusal({}, Float8Recipe().small_size(0, -1), c10::kHalf),
             Contains("float8_plan: expected small_size of the recipe to be at least 0, got (0, "
                      "-1)"));
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "fp8 region: small products stay in the base dtype, recorded or not", "[float8]") {
  const auto x = at::randn({4, 32});
  const auto weight = at::randn({16, 32}).requires_grad_();
  const auto outcome_with = [&](const Float8Recipe& recipe) {
    const AutocastGuard region(c10::kCPU, recipe);
    CHECK(fastamp::float8_recipe(c10::kCPU)->small_size() == recipe.small_size());
    const auto outcome = outcome_of(x, weight);
    CHECK(outcome_of(x, weight.detach()) == outcome);
    {
      const at::NoGradGuard no_grad;
      CHECK(outcome_of(x, weight) == outcome);
    }
    const c10::InferenceMode inference;
    CHECK(outcome_of(x, weight) == outcome);
    return outcome;
  };
  CHECK(outcome_with(Float8Recipe()) == "float8");  // On the CPU none is small by default.
  CHECK(outcome_with(Float8Recipe().small_size(32, 16)) == kSmall);
  CHECK(outcome_with(Float8Recipe().small_size(16, 16)) == "float8");
  CHECK(outcome_with(Float8Recipe().small_size(32, 0)) == "float8");
}
