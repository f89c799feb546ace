// SPDX-License-Identifier: Apache-2.0
// Views of whole weights share the weight's cast: LibTorch's Linear multiplies with `weight.t()`.

#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/optim/sgd.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <vector>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

constexpr std::int64_t kRows = 48;
constexpr std::int64_t kColumns = 32;

template <class Function>
fastamp::CastCounts casts_of(const Function& function) {
  const fastamp::Trace trace;
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  function();
  return trace.totals();
}

/// Both outputs and both gradients of a pass that uses a layer twice.
std::vector<at::Tensor> train(torch::nn::Linear linear, const at::Tensor& input) {
  linear->zero_grad();
  const auto hidden = linear->forward(input);
  const auto again = linear->forward(hidden.slice(-1, 0, kColumns));
  (again * again).sum().backward();
  return {hidden, again, linear->weight.grad().clone(), linear->bias.grad().clone()};
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "torch::nn::Linear: its weight is cast once, to torch's bits",
                 "[autocast][weight_view]") {
  torch::nn::Linear linear(kColumns, kRows);
  const bool flat = GENERATE(true, false);  // addmm of the bias, or matmul and an addition
  const auto input = flat ? at::randn({4, kColumns}) : at::randn({2, 3, kColumns});
  std::vector<at::Tensor> own;
  const auto casts = casts_of([&] { own = train(linear, input); });
  CHECK(casts.weight_casts == (flat ? 2 : 1));  // the bias of an addmm is one
  const auto torchs =
      with_torch_kernels(c10::kCPU, c10::kBFloat16, [&] { return train(linear, input); });
  for (std::size_t i = 0; i < torchs.size(); ++i) {
    CHECK(bit_equal(own[i], torchs[i]));
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "torch::nn::Linear: kept casts serve it in later regions",
                 "[autocast][weight_view][kept]") {
  torch::nn::Linear linear(kColumns, kRows);
  const bool frozen = GENERATE(true, false);
  linear->weight.requires_grad_(!frozen);
  const auto input = at::randn({4, kColumns});
  const fastamp::KeepCastsGuard keep(linear->parameters());
  const auto use = [&] { linear->forward(input); };
  CHECK(casts_of(use).weight_casts == 2);
  const auto second = casts_of(use);
  CHECK(second.weight_casts == 0);
  CHECK(second.kept_hits == 2);
  CHECK(second.cast_bytes == 4 * kColumns * 2);  // the input alone
}

TEST_CASE_METHOD(LeavesNoTrace, "torch::nn::Linear: our optimizers write its copies",
                 "[autocast][weight_view]") {
  torch::nn::Linear linear(kColumns, kRows);
  fastamp::optim::SGD optimizer(linear->parameters(),
                                fastamp::optim::SGDOptions(0.1).autocast_dtype(c10::kBFloat16));
  const auto input = at::randn({4, kColumns});
  const auto step = [&] {
    optimizer.zero_grad();
    linear->forward(input).sum().backward();
    optimizer.step();
  };
  casts_of(step);
  casts_of(step);
  CHECK(casts_of(step).weight_casts == 0);
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto weight = linear->weight.detach().to(at::kBFloat16);
  const auto bias = linear->bias.detach().to(at::kBFloat16);
  CHECK(bit_equal(linear->forward(input).detach(),
                  at::linear(input.to(at::kBFloat16), weight, bias)));
}
