// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/policy.h>

#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/binary_cross_entropy.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

struct Case {
  std::string name;
  bool lower;
  std::function<at::Tensor()> run;
};

std::vector<Case> cases(c10::ScalarType lower) {
  const auto x = at::randn({16, 16}, c10::kCUDA);
  const auto low = x.to(lower);
  return {
      {"mm", true, [=] { return at::mm(x, x); }},
      {"linear", true, [=] { return at::linear(x, x); }},
      {"relu of lower", true, [=] { return at::relu(low); }},
      {"softmax", false, [=] { return at::softmax(low, 1); }},
      {"sum", false, [=] { return at::sum(low); }},
      {"norm", false, [=] { return at::norm(low, 2); }},
      {"exp", false, [=] { return low.exp(); }},
      {"mse_loss", false, [=] { return at::mse_loss(low, x); }},
      {"addcmul, promote", false, [=] { return low.addcmul(x, low); }},
      {"dot, promote of lower", true, [=] { return low.view({-1}).dot(low.view({-1})); }},
  };
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "cuda: bits of tensors on a device are compared", "[guard]") {
  const auto ones = at::ones({3, 2}, at::TensorOptions(at::kFloat).device(at::kCUDA));
  CHECK(bit_equal(ones, ones.clone()));
  CHECK(bit_equal(ones.t(), ones.t().contiguous()));
  CHECK_FALSE(bit_equal(ones, -ones));
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: results on CUDA are those of torch's own kernels",
                 "[autocast][cuda]") {
  const auto lower = GENERATE(c10::kBFloat16, c10::kHalf);
  for (const auto& each : cases(lower)) {
    CAPTURE(each.name);
    const auto by_torch = with_torch_kernels(c10::kCUDA, lower, each.run);
    const AutocastGuard region(c10::kCUDA, lower);
    CHECK(public_state().cuda_enabled);
    CHECK(public_state().cuda_dtype == lower);
    const auto by_fastamp = each.run();
    CHECK(by_fastamp.scalar_type() == (each.lower ? lower : c10::kFloat));
    CHECK(bit_equal(by_fastamp.cpu(), by_torch.cpu()));
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "AutocastGuard: a CUDA region is float16 by default",
                 "[autocast][cuda]") {
  const auto x = at::ones({2, 2}, c10::kCUDA);
  const auto on_cpu = at::ones({2, 2});
  const AutocastGuard region(c10::kCUDA);
  CHECK(at::mm(x, x).scalar_type() == c10::kHalf);
  CHECK(at::mm(on_cpu, on_cpu).scalar_type() == c10::kFloat);
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "AutocastGuard: binary_cross_entropy is refused on CUDA, and says what to use",
                 "[autocast][cuda]") {
  const auto p = at::rand({4}, c10::kCUDA);
  const AutocastGuard region(c10::kCUDA);
  const auto text = error_text<c10::Error>([&] { at::binary_cross_entropy(p, p); });
  CAPTURE(text);
  CHECK(text.find("binary_cross_entropy_with_logits") != std::string::npos);
}

namespace {

struct Lstm {
  at::Tensor input = at::randn({5, 3, 8}, c10::kCUDA).requires_grad_();
  std::vector<at::Tensor> state{at::zeros({1, 3, 16}, c10::kCUDA),
                                at::zeros({1, 3, 16}, c10::kCUDA)};
  std::vector<at::Tensor> weights{at::randn({64, 8}, c10::kCUDA), at::randn({64, 16}, c10::kCUDA),
                                  at::randn({64}, c10::kCUDA), at::randn({64}, c10::kCUDA)};

  /// Output and the gradients of the input and all weights.
  std::vector<at::Tensor> run() {
    std::vector<at::Tensor> leaves{input};
    for (auto& weight : weights) {
      leaves.push_back(weight.requires_grad_());
    }
    for (auto& leaf : leaves) {
      leaf.mutable_grad() = at::Tensor();
    }
    const auto output = std::get<0>(at::lstm(input, state, weights, /*has_biases=*/true,
                                             /*num_layers=*/1, /*dropout=*/0.0, /*train=*/true,
                                             /*bidirectional=*/false, /*batch_first=*/false));
    output.sum().backward();
    std::vector<at::Tensor> results{output};
    for (const auto& leaf : leaves) {
      results.push_back(leaf.grad());
    }
    return results;
  }
};

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace,
                 "LSTM: outputs and gradients on CUDA are those of torch's own kernel",
                 "[autocast][cuda]") {
  REQUIRE(at::globalContext().userEnabledCuDNN());
  Lstm lstm;
  const auto by_torch = with_torch_kernels(c10::kCUDA, c10::kHalf, [&] { return lstm.run(); });
  const AutocastGuard region(c10::kCUDA, c10::kHalf);
  // Twice: the casts moved into cuDNN's buffer must not come back from the weight cache.
  for (int call = 0; call < 2; ++call) {
    const auto by_fastamp = lstm.run();
    CHECK(by_fastamp[0].scalar_type() == c10::kHalf);
    REQUIRE(by_fastamp.size() == by_torch.size());
    for (std::size_t i = 0; i < by_torch.size(); ++i) {
      CAPTURE(call, i);
      CHECK(by_fastamp[i].scalar_type() == by_torch[i].scalar_type());
      CHECK(at::allclose(by_fastamp[i], by_torch[i], 1e-3, 1e-3));
    }
  }
}
