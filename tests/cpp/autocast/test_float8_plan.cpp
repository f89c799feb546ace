// SPDX-License-Identifier: Apache-2.0
// Which products run in fp8 on a GPU, by the rule of their sizes, and plans made by it.

#include "autocast/float8_gpu.h"
#include "autocast/float8_rule.h"
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

#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::float8_plan;
using fastamp::Float8Recipe;
using fastamp::Float8Shape;
using namespace fastamp::autocast;
using namespace fastamp::test;
using Catch::Matchers::Contains;

namespace {

constexpr const char* kGpu = "H200 SXM";

/// The rule is asked for an H200 on the CPU too.
class PretendedGpu {
 public:
  PretendedGpu() { pretend_float8_gpu(kGpu); }
  ~PretendedGpu() { pretend_float8_gpu(""); }
  PretendedGpu(const PretendedGpu&) = delete;
  PretendedGpu& operator=(const PretendedGpu&) = delete;
  PretendedGpu(PretendedGpu&&) = delete;
  PretendedGpu& operator=(PretendedGpu&&) = delete;
};

std::string outcome_of(const at::Tensor& x, const at::Tensor& weight) {
  fastamp::Trace trace;
  at::linear(x, weight);
  trace.stop();
  REQUIRE(trace.rows().size() == 1);
  return trace.rows()[0].float8;
}

double gain_of(const Float8Shape& shape) {
  return predict_float8(float8_gpu_named("test", kGpu), shape, c10::kBFloat16).gain;
}

}  // namespace

TEST_CASE("fp8 plan: a row for each shape says what becomes of it", "[float8]") {
  const auto rows = float8_plan({{.m = 8192, .k = 4096, .n = 14336},
                                 {.m = 64, .k = 64, .n = 64},
                                 {.m = 8192, .k = 4096, .n = 4104},
                                 {.m = 8192, .k = 4100, .n = 4096},
                                 {.m = 0, .k = 64, .n = 64},
                                 {.m = 8192, .k = 4096, .n = 4096, .x_dtype = c10::kDouble}},
                                kGpu);
  REQUIRE(rows.size() == 6);
  CHECK(rows[0].float8 == "float8");
  CHECK(rows[0].gain > 1.4);
  CHECK(rows[0].gain == Approx(rows[0].carrier_seconds / rows[0].float8_seconds));
  CHECK(rows[1].float8 == "gain below min_gain");
  CHECK(rows[1].gain < 1);
  CHECK(rows[2].float8 == "K or N not a multiple of 16");
  CHECK(rows[3].float8 == "K or N not a multiple of 16");
  CHECK(rows[4].float8 == "empty");
  CHECK(rows[4].gain == 0);
  CHECK(rows[5].float8 == "dtype");
}

TEST_CASE("fp8 plan: backward keeps half of the bytes of a 16-bit region", "[float8]") {
  const auto saved = [](const Float8Shape& shape) {
    const auto row = float8_plan({shape}, kGpu, Float8Recipe().min_gain(0))[0];
    return std::pair(row.carrier_saved_bytes, row.saved_bytes);
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

TEST_CASE("fp8 plan: min_gain is the least gain with which a product runs in fp8", "[float8]") {
  const Float8Shape shape{.m = 8192, .k = 2048, .n = 2048};
  const double gain = gain_of(shape);
  const auto outcome = [&](double min_gain, const Float8Shape& of) {
    return float8_plan({of}, kGpu, Float8Recipe().min_gain(min_gain))[0].float8;
  };
  CHECK(outcome(gain, shape) == "float8");
  CHECK(outcome(std::nextafter(gain, 2), shape) == "gain below min_gain");
  CHECK(outcome(std::numeric_limits<double>::infinity(), shape) == "gain below min_gain");
  CHECK(outcome(0, {.m = 1, .k = 16, .n = 16}) == "float8");
  CHECK(outcome(std::numeric_limits<double>::min(), {.m = 1, .k = 16, .n = 16}) == "float8");
}

TEST_CASE("fp8 plan: what is asked wrongly is refused", "[float8]") {
  const auto refusal = [](const Float8Shape& shape, const char* gpu, const Float8Recipe& recipe,
                          c10::ScalarType carrier) {
    return error_text<c10::ValueError>([&] { float8_plan({{}, shape}, gpu, recipe, carrier); });
  };
  CHECK_THAT(refusal({.m = -1}, kGpu, {}, c10::kHalf),
             Contains("float8_plan: expected sizes of shapes[1] to be at least 0, got m -1"));
  CHECK_THAT(refusal({}, "A100", {}, c10::kHalf),
             Contains("float8_plan: expected gpu to be one of H100 SXM, H200 SXM, H200 NVL, got "
                      "'A100'"));
  CHECK_THAT(refusal({}, kGpu, {}, c10::kFloat), Contains("got Float"));
  for (const double bad : {-0.1, std::nan(""), -std::numeric_limits<double>::infinity()}) {
    CHECK_THAT(refusal({}, kGpu, Float8Recipe().min_gain(bad), c10::kHalf),
               Contains("float8_plan: expected min_gain of Float8Recipe to be at least 0, got"));
  }
  CHECK(float8_plan({}, kGpu).empty());
  CHECK(fastamp::float8_gpus() == std::vector<std::string>{"H100 SXM", "H200 SXM", "H200 NVL"});
}

TEST_CASE("fp8 rule: products of 8192 cubed take as long as published", "[float8]") {
  // Nothing but one product in each way: no cast to 16 bits, no gradients.
  const Float8Shape shape{.m = 8192,
                          .k = 8192,
                          .n = 8192,
                          .weight_dtype = c10::kBFloat16,
                          .x_gradient = false,
                          .weight_gradient = false};
  const double work = 2 * std::pow(8192., 3);
  const auto rate = [&](const char* gpu) {
    return work / float8_plan({shape}, gpu)[0].carrier_seconds / 1e12;
  };
  CHECK(rate("H200 SXM") == Approx(757).epsilon(0.01));
  const auto row = float8_plan({shape}, "H100 SXM")[0];
  const double casts = 2 * (2 + 3) * std::pow(8192., 2) / 2.58e12 + 4 * 2.5e-6;
  CHECK(work / (row.float8_seconds - casts) / 1e12 == Approx(1137).epsilon(0.02));
}

TEST_CASE("fp8 rule: small products wait for launches, and gain nothing", "[float8]") {
  // y, dX and dW; the weight to 16 bits and its gradient back: 5. In fp8 two passes for each of
  // three casts: 9.
  CHECK(gain_of({.m = 128, .k = 128, .n = 128}) == Approx(5. / 9));
  CHECK(gain_of({.m = 128, .k = 128, .n = 128, .has_bias = true}) == Approx(6. / 9));
  // As large as it can be without being small: 2e10 FLOP of y.
  CHECK(gain_of({.m = 4096, .k = 1552, .n = 1552}) < 0.6);
  CHECK(gain_of({.m = 4096, .k = 1568, .n = 1568}) > 1);
}

TEST_CASE("fp8 rule: a GPU is its line of the table, or one like it", "[float8]") {
  const auto nvl = float8_gpu_like({"NVIDIA H200 NVL", 90, 132, 4.8e12});
  CHECK(nvl.name == "H200 NVL");
  CHECK(nvl.float8_rate == float8_gpu_named("test", "H200 NVL").float8_rate);
  const auto slice = float8_gpu_like({"NVIDIA H200", 90, 60, 2.4e12});
  CHECK(slice.name == "other sm_90");
  CHECK(slice.multiprocessors == 60);
  CHECK(slice.carrier_rate == Approx(60 * 6.1e12));
  CHECK(slice.bandwidth == Approx(0.7 * 2.4e12));
  CHECK(float8_gpu_like({"NVIDIA L40S", 89, 142, 0}).name == "other sm_89");
  CHECK(float8_gpu_like({"NVIDIA L40S", 89, 142, 0}).bandwidth == Approx(142 * 5e9));
  CHECK(float8_gpu_like({"NVIDIA B300", 103, 148, 8e12}).name == "other sm_100");
  CHECK(float8_gpu_like({"NVIDIA GeForce RTX 5090", 120, 170, 1.8e12}).name == "other sm_120");
  CHECK(float8_gpu_like({"later", 200, 170, 1.8e12}).name == "other sm_120");
  // Where nothing is known, fp8 must promise less than where something is.
  const Float8Shape shape{.m = 16384, .k = 8192, .n = 8192};
  const auto other = float8_gpu_like({"NVIDIA H200 of another name", 90, 132, 4.8e12});
  CHECK(predict_float8(other, shape, c10::kBFloat16).gain < gain_of(shape));
}

TEST_CASE("fp8 rule: is not asked on the CPU", "[float8]") {
  CHECK(float8_gpu(c10::kCPU) == nullptr);
  CHECK_THAT(error_text<c10::ValueError>([] { pretend_float8_gpu("H300"); }),
             Contains("expected gpu to be one of"));
  const PretendedGpu pretended;
  CHECK(float8_gpu(c10::kCPU)->name == kGpu);
}

TEST_CASE_METHOD(LeavesNoTrace, "fp8 region: products with too little gain stay in the carrier",
                 "[float8]") {
  const auto x = at::randn({4, 32});
  const auto weight = at::randn({16, 32}).requires_grad_();
  {
    const AutocastGuard region(c10::kCPU, Float8Recipe());
    CHECK(outcome_of(x, weight) == "float8");
    const PretendedGpu pretended;
    CHECK(outcome_of(x, weight) == "gain below min_gain");
    std::string elsewhere;
    std::thread([&] {
      const AutocastGuard other(c10::kCPU, Float8Recipe());
      elsewhere = outcome_of(x, weight);
    }).join();
    CHECK(elsewhere == "gain below min_gain");
  }
  const PretendedGpu pretended;
  // x is float32 here: it is cast to 16 bits and its gradient back.
  const double gain = gain_of({.m = 4, .k = 32, .n = 16, .x_dtype = c10::kFloat});
  {
    const AutocastGuard region(c10::kCPU, Float8Recipe().min_gain(gain));
    CHECK(outcome_of(x, weight) == "float8");
    CHECK(fastamp::float8_recipe(c10::kCPU)->min_gain() == gain);
  }
  const AutocastGuard region(c10::kCPU, Float8Recipe().min_gain(std::nextafter(gain, 2)));
  CHECK(outcome_of(x, weight) == "gain below min_gain");
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "fp8 region: what a checkpoint runs without recording is decided as with",
                 "[float8]") {
  const auto x = at::randn({4, 32});
  const auto weight = at::randn({16, 32}).requires_grad_();
  const PretendedGpu pretended;
  const double trained = gain_of({.m = 4, .k = 32, .n = 16, .x_dtype = c10::kFloat});
  const double inferred = gain_of({.m = 4,
                                   .k = 32,
                                   .n = 16,
                                   .x_dtype = c10::kFloat,
                                   .x_gradient = false,
                                   .weight_gradient = false});
  REQUIRE(inferred < trained);
  const AutocastGuard region(c10::kCPU, Float8Recipe().min_gain((inferred + trained) / 2));
  CHECK(outcome_of(x, weight) == "float8");
  {
    const at::NoGradGuard no_grad;
    CHECK(outcome_of(x, weight) == "float8");
  }
  CHECK(outcome_of(x, weight.detach()) == "gain below min_gain");
  const c10::InferenceMode inference;
  CHECK(outcome_of(x, weight) == "gain below min_gain");
}
