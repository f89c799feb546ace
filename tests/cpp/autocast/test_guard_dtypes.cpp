// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>

#include <ATen/Context.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/binary_cross_entropy.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/fft_rfft.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linalg_inv.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/prelu.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/trace.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <string>
#include <vector>

using namespace fastamp::test;

namespace {

enum class Expected { lower, fp32, as_given };

/// One op on fixed inputs; the result's dtype in a region is `expected`.
struct Case {
  std::string name;
  Expected expected;
  std::function<at::Tensor()> run;
};

at::Tensor random(at::IntArrayRef sizes, c10::ScalarType dtype = c10::kFloat) {
  return at::randn(sizes, at::kFloat).to(dtype);
}

std::vector<Case> lower_cases() {
  const auto a = random({8, 16});
  const auto b = random({16, 4});
  const auto bias = random({4});
  const auto x = random({2, 8, 16});
  const auto image = random({2, 3, 8, 8});
  const auto filter = random({4, 3, 3, 3});
  const auto q = random({2, 2, 8, 16});
  return {
      {"mm", Expected::lower, [=] { return at::mm(a, b); }},
      {"mm of half and float", Expected::lower, [=] { return at::mm(a.to(c10::kHalf), b); }},
      {"mm of half and bfloat16", Expected::lower,
       [=] { return at::mm(a.to(c10::kHalf), b.to(c10::kBFloat16)); }},
      {"matmul", Expected::lower, [=] { return at::matmul(x, b); }},
      {"bmm", Expected::lower, [=] { return at::bmm(x, x.transpose(1, 2)); }},
      {"baddbmm", Expected::lower,
       [=] { return at::baddbmm(at::ones({2, 8, 8}), x, x.transpose(1, 2)); }},
      {"addmm", Expected::lower, [=] { return at::addmm(bias, a, b); }},
      {"linear with bias", Expected::lower, [=] { return at::linear(a, b.t(), bias); }},
      {"linear without bias", Expected::lower, [=] { return at::linear(a, b.t()); }},
      {"conv2d", Expected::lower, [=] { return at::conv2d(image, filter, bias); }},
      {"prelu", Expected::lower, [=] { return at::prelu(image, bias.slice(0, 0, 3)); }},
      {"attention", Expected::lower, [=] { return at::scaled_dot_product_attention(q, q, q); }},
  };
}

std::vector<Case> fp32_cases() {
  const auto low = random({8, 8}, c10::kBFloat16);
  const auto half = random({8, 8}, c10::kHalf);
  const auto target = at::arange(8);
  const auto volume = random({1, 2, 4, 4, 4}, c10::kBFloat16);
  const auto invertible = at::eye(8).mul(8).add(low).to(c10::kBFloat16);
  const auto probability = at::rand({8, 8}).to(c10::kBFloat16);
  return {
      {"mse_loss", Expected::fp32, [=] { return at::mse_loss(low, half); }},
      {"cross_entropy_loss", Expected::fp32, [=] { return at::cross_entropy_loss(low, target); }},
      {"binary_cross_entropy", Expected::fp32,
       [=] { return at::binary_cross_entropy(probability, probability); }},
      {"trace", Expected::fp32, [=] { return at::trace(half); }},
      {"prod", Expected::fp32, [=] { return at::prod(low); }},
      {"linalg_inv", Expected::fp32, [=] { return at::linalg_inv(invertible); }},
      {"adaptive_avg_pool3d", Expected::fp32,
       [=] { return at::adaptive_avg_pool3d(volume, {2, 2, 2}); }},
      {"fft_rfft, real part", Expected::fp32, [=] { return at::view_as_real(at::fft_rfft(low)); }},
  };
}

std::vector<Case> other_cases(c10::ScalarType lower) {
  const auto x = random({4, 4});
  const auto low = x.to(lower);
  const auto fp64 = x.to(c10::kDouble);
  const auto whole = at::arange(16).reshape({4, 4});
  const auto index = at::arange(4);
  return {
      {"cat of lower", Expected::lower, [=] { return at::cat({low, low}); }},
      {"cat of lower and float", Expected::fp32, [=] { return at::cat({low, x}); }},
      {"stack of lower and float", Expected::fp32, [=] { return at::stack({low, x}); }},
      {"index_copy", Expected::fp32, [=] { return at::index_copy(x, 0, index, low); }},
      {"add is left alone", Expected::as_given, [=] { return x.add(x); }},
      {"relu of lower is left alone", Expected::as_given, [=] { return at::relu(low); }},
      {"softmax is left alone on CPU", Expected::as_given, [=] { return at::softmax(low, 1); }},
      {"sum is left alone on CPU", Expected::as_given, [=] { return at::sum(low); }},
      {"layer_norm is left alone on CPU", Expected::as_given,
       [=] { return at::layer_norm(low, {4}); }},
      {"mm of doubles stays double", Expected::as_given, [=] { return at::mm(fp64, fp64); }},
      {"mm of integers stays integer", Expected::as_given, [=] { return at::mm(whole, whole); }},
      {"mm_out is left alone", Expected::as_given,
       [=] {
         auto out = at::zeros({4, 4});
         return at::mm_out(out, x, x);
       }},
      {"in-place addmm_ is left alone", Expected::as_given,
       [=] { return at::zeros({4, 4}).addmm_(x, x); }},
  };
}

std::vector<Case> all_cases(c10::ScalarType lower) {
  at::manual_seed(7);
  auto cases = lower_cases();
  for (auto&& more : {fp32_cases(), other_cases(lower)}) {
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: results on CPU are those of torch's own kernels, bit for bit",
                 "[autocast][guard]") {
  const auto lower = GENERATE(c10::kBFloat16, c10::kHalf);
  CAPTURE(c10::toString(lower));
  for (const auto& each : all_cases(lower)) {
    CAPTURE(each.name);
    const auto plain_dtype =
        each.expected == Expected::as_given ? each.run().scalar_type() : c10::kFloat;
    const auto by_torch = with_torch_kernels(c10::kCPU, lower, each.run);
    const auto by_fastamp = [&] {
      const fastamp::AutocastGuard region(c10::kCPU, lower);
      return each.run();
    }();
    CHECK(by_fastamp.scalar_type() == (each.expected == Expected::lower ? lower : plain_dtype));
    CHECK(bit_equal(by_fastamp, by_torch));
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: gradients on CPU are those of torch's own kernels",
                 "[autocast][guard]") {
  const auto lower = GENERATE(c10::kBFloat16, c10::kHalf);
  at::manual_seed(3);
  const auto x = random({8, 16}).requires_grad_();
  const auto w = random({16, 16}).requires_grad_();
  const auto run = [&] {
    x.mutable_grad() = at::Tensor();
    w.mutable_grad() = at::Tensor();
    const auto hidden = at::relu(at::linear(x, w));
    at::mse_loss(at::linear(hidden, w), x).backward();
    return at::cat({x.grad(), w.grad()});
  };
  const auto by_torch = with_torch_kernels(c10::kCPU, lower, run);
  const fastamp::AutocastGuard region(c10::kCPU, lower);
  const auto by_fastamp = run();
  CHECK(by_fastamp.scalar_type() == c10::kFloat);
  CHECK(bit_equal(by_fastamp, by_torch));
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: a mix of float16 and bfloat16 is promoted to float32",
                 "[autocast][guard]") {
  const auto half = at::ones({2, 2}, c10::kHalf);
  const auto bf16 = at::ones({2, 2}, c10::kBFloat16).mul(3);
  const fastamp::AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto joined = at::cat({half, bf16});
  CHECK(joined.scalar_type() == c10::kFloat);
  CHECK(joined.sum().item<float>() == 16.0F);
  CHECK(at::stack({bf16, half}).scalar_type() == c10::kFloat);
  // float16 alone is no mix, but not the region's dtype either.
  CHECK(at::cat({half, half}).scalar_type() == c10::kFloat);
}
