// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <sstream>

using fastamp::AutocastGuard;
using namespace fastamp::test;

namespace {

constexpr const char* kSource = R"(
def forward(self, x):
    hidden = torch.relu(torch.linear(x, self.first, self.bias))
    return torch.linear(hidden, self.second)
def probabilities(self, x):
    return torch.softmax(self.forward(x), 1)
)";

/// A model as programs get it: written with torch.jit, saved, loaded.
torch::jit::Module saved_and_loaded() {
  torch::jit::Module module("Mlp");
  module.register_parameter("first", at::randn({32, 16}).requires_grad_(), false);
  module.register_parameter("bias", at::randn({32}).requires_grad_(), false);
  module.register_parameter("second", at::randn({8, 32}).requires_grad_(), false);
  module.define(kSource);
  std::stringstream file;
  module.save(file);
  return torch::jit::load(file);
}

at::Tensor eager(const torch::jit::Module& m, const at::Tensor& x) {
  const auto parameter = [&](const char* name) { return m.attr(name).toTensor(); };
  const auto hidden = at::relu(at::linear(x, parameter("first"), parameter("bias")));
  return at::linear(hidden, parameter("second"));
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace,
                 "TorchScript: a loaded module runs in the region's dtype, as eager code does",
                 "[autocast][jit]") {
  const auto dtype = GENERATE(c10::kBFloat16, c10::kHalf);
  at::manual_seed(11);
  auto module = saved_and_loaded();
  const auto x = at::randn({4, 16});
  const at::NoGradGuard no_grad;
  // The executor profiles its first calls and optimizes the later ones.
  for (int call = 0; call < 4; ++call) {
    CAPTURE(call);
    const AutocastGuard region(c10::kCPU, dtype);
    const auto y = module.forward({x}).toTensor();
    CHECK(y.scalar_type() == dtype);
    CHECK(bit_equal(y, eager(module, x)));
    const auto p = module.run_method("probabilities", x).toTensor();
    CHECK(p.scalar_type() == dtype);
    CHECK(bit_equal(p, at::softmax(eager(module, x), 1)));
  }
}

TEST_CASE_METHOD(LeavesNoTrace,
                 "TorchScript: the same module runs in float32 outside regions and when disabled",
                 "[autocast][jit]") {
  at::manual_seed(12);
  auto module = saved_and_loaded();
  const auto x = at::randn({4, 16});
  const at::NoGradGuard no_grad;
  for (int call = 0; call < 3; ++call) {
    CAPTURE(call);
    CHECK(module.forward({x}).toTensor().scalar_type() == c10::kFloat);
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      CHECK(module.forward({x}).toTensor().scalar_type() == c10::kBFloat16);
      const AutocastGuard off(c10::kCPU, std::nullopt, false);
      CHECK(bit_equal(module.forward({x}).toTensor(), eager(module, x)));
    }
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "TorchScript: gradients of a loaded module are those of eager code",
                 "[autocast][jit]") {
  at::manual_seed(13);
  auto module = saved_and_loaded();
  const auto x = at::randn({4, 16});
  const auto weight = module.attr("first").toTensor();
  for (int call = 0; call < 4; ++call) {
    CAPTURE(call);
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    module.forward({x}).toTensor().sum().backward();
    const auto scripted = weight.grad().clone();
    weight.mutable_grad() = at::Tensor();
    eager(module, x).sum().backward();
    CHECK(scripted.scalar_type() == c10::kFloat);
    CHECK(bit_equal(scripted, weight.grad()));
    weight.mutable_grad() = at::Tensor();
  }
}
