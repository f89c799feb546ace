// SPDX-License-Identifier: Apache-2.0
// What C++ reports of ranges, loss scale and weights.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/scaler/inspector.h>

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <limits>
#include <sstream>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers
using fastamp::Inspector;
using fastamp::NumberRange;

namespace {

torch::OrderedDict<std::string, at::Tensor> named(const at::Tensor& parameter) {
  torch::OrderedDict<std::string, at::Tensor> names;
  names.insert("weight", parameter);
  return names;
}

}  // namespace

TEST_CASE("underflow_report: zeros by parameter, and what another scale would do", "[scaler]") {
  auto scaler = started(cpu_options().init_scale(8.0));
  CHECK_FALSE(scaler.underflow_report());
  CHECK(scaler.underflow_report().str() == "No gradients were counted.");
  auto good = parameter_with(1.0F);
  auto zeros = at::ones({2, 2}).requires_grad_(true);
  torch::optim::SGD optimizer({good, zeros}, torch::optim::SGDOptions(1.0));
  zeros.mutable_grad() = at::tensor({0.0F, 1024.0F, 0x1p-20F, -0.0F}).reshape({2, 2});
  scaler.step(optimizer);
  scaler.update();
  const auto report = scaler.underflow_report(named(zeros));
  REQUIRE(report);
  CHECK(report.step == 0);
  CHECK(report.scale == 8.0);
  REQUIRE(report.gradients.size() == 1);
  CHECK(report.gradients[0].name == "weight");
  CHECK(report.gradients[0].index == 1);
  CHECK(report.gradients[0].shape == std::vector<int64_t>{2, 2});
  CHECK(report.gradients[0].zeros == 2);
  CHECK(report.gradients[0].elements == 4);
  CHECK(report.range.elements() == 6);
  CHECK(report.share_of_zeros(8.0) == 2.0 / 6);
  CHECK(report.share_of_zeros(8.0 / 64) == 3.0 / 6);  // 2^-26 rounds to 0
  CHECK(report.largest_scale() == 8.0 * 32);          // 1024 * 32 < 65504
  CHECK(report.str().find("Step 0 at scale 8: 2 of 6 gradient elements (33.3333 %) are 0") == 0);
}

TEST_CASE("Inspector: ranges, loss scale and weights that stall", "[scaler]") {
  auto weight = at::full({4}, 256.0, at::kBFloat16).requires_grad_(true);
  Inspector inspector(named(weight));
  weight.mutable_grad() = at::tensor({16.0F, 0.25F, 0.0F, 0x1p-24F}).to(at::kBFloat16);
  inspector.after_backward(4.0);
  REQUIRE(inspector.gradients().size() == 1);
  const auto& range = inspector.gradients()[0].range;
  CHECK(range.greatest() == 16.0);
  CHECK(range.least() == 0x1p-24);
  CHECK(range.zeros() == 1);
  CHECK(range.at_exponent(4) == 1);
  CHECK(range.share_of_subnormals(at::kHalf) == 0.25);
  CHECK(inspector.share_of_zeros(4.0) == 0.25);
  CHECK(inspector.share_of_zeros(1.0) == 0.5);
  CHECK(inspector.largest_scale() == 4.0 * 2048);  // 16 * 4096 = 65536 is too large
  CHECK(inspector.weights().empty());
  {
    const at::NoGradGuard no_grad;
    weight.sub_(weight.grad() /
                4);  // 4 is two units of bf16 there; the others are below half of one
  }
  inspector.after_step();
  REQUIRE(inspector.weights().size() == 1);
  CHECK(inspector.weights()[0].stalled == Approx(2.0 / 3));
  CHECK(inspector.weights()[0].update == Approx(4.0 / 512));
  std::ostringstream text;
  text << inspector;
  CHECK(text.str().find("weight  BFloat16  stalled 66.67 %") != std::string::npos);
}

TEST_CASE("Inspector: refusals, and nothing to inspect", "[scaler]") {
  auto weight = at::ones({2}).requires_grad_(true);
  Inspector inspector(named(weight));
  CHECK_THROWS_AS(inspector.after_step(), c10::Error);
  CHECK_THROWS_AS(inspector.after_backward(0.0), c10::ValueError);
  CHECK_THROWS_AS(inspector.after_backward(std::numeric_limits<double>::infinity()),
                  c10::ValueError);
  inspector.after_backward();
  CHECK(inspector.gradients().empty());
  CHECK(inspector.largest_scale() == 0.0);
  Inspector none((torch::OrderedDict<std::string, at::Tensor>()));
  none.after_backward();
  none.after_step();
  CHECK(none.weights().empty());
  CHECK_THROWS_AS(Inspector(named(at::Tensor())), c10::ValueError);
}

TEST_CASE("NumberRange: sums, bounds and refusals", "[scaler]") {
  const auto both = at::tensor({1.0F, 3.0F, 0.0F, std::numeric_limits<float>::infinity()});
  auto sum = NumberRange::of(both.slice(0, 0, 2));
  sum += NumberRange::of(both.slice(0, 2));
  const auto whole = NumberRange::of(both);
  for (int64_t exponent = -127; exponent < 128; ++exponent) {
    CHECK(sum.at_exponent(exponent) == whole.at_exponent(exponent));
  }
  CHECK(sum.inf() == 1);
  CHECK(sum.greatest() == 3.0);
  CHECK(sum.least() == 1.0);
  CHECK(NumberRange().least() == 0.0);
  CHECK_FALSE(NumberRange().largest_shift(at::kHalf));
  CHECK_THROWS_AS(whole.at_exponent(128), c10::ValueError);
  CHECK_THROWS_AS(whole.share_of_zeros(at::kLong), c10::TypeError);
  CHECK_THROWS_AS(NumberRange::of(both.to(at::kDouble)), c10::TypeError);
  CHECK(NumberRange::of_each({}).empty());
}
