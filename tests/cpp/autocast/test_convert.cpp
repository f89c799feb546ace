// SPDX-License-Identifier: Apache-2.0
// convert() and policy_preset().

#include "support/catch.h"

#include <fastamp/autocast/convert.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/policy_preset.h>
#include <fastamp/autocast/trace.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

using fastamp::AutocastGuard;

namespace {

/// An embedding that is the head, too, between layers of all kinds.
struct Model : torch::nn::Module {
  Model() {
    register_module("words", words);
    register_module("up", up);
    register_module("norm", norm);
    register_module("down", down);
    register_module("spare", spare);
    shift = register_parameter("shift", at::ones({8}));
  }

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = norm(up(words(tokens)).relu());
    return at::linear(down(x) + shift, words->weight);
  }

  torch::nn::Embedding words{20, 8};
  torch::nn::Linear up{8, 16};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({16})};
  torch::nn::Linear down{torch::nn::LinearOptions(16, 8).bias(false)};
  torch::nn::Linear spare{8, 8};
  at::Tensor shift;
};

std::map<std::string, std::string> reasons(const fastamp::Conversion& conversion) {
  std::map<std::string, std::string> found;
  for (const auto& parameter : conversion.parameters) {
    CHECK(parameter.is_converted == parameter.reason.empty());
    found[parameter.name] = parameter.reason;
  }
  return found;
}

}  // namespace

TEST_CASE(
    "A converted module computes what the region computed over float32, with no weight cast") {
  const auto dtype = GENERATE(c10::kBFloat16, c10::kHalf);
  const bool cuda_lists = GENERATE(false, true);
  CAPTURE(dtype, cuda_lists);
  const at::NoGradGuard no_grad;
  const fastamp::OpPolicyGuard lists(
      fastamp::policy_preset(cuda_lists ? c10::kCUDA : c10::kCPU, c10::kCPU));
  Model model;
  const auto tokens = at::randint(20, {3, 5}, c10::kLong);
  at::Tensor expected;
  {
    const AutocastGuard region(c10::kCPU, dtype);
    expected = model.forward(tokens);
  }
  const auto weight = model.up->weight;
  const auto conversion = fastamp::convert(model, dtype, [&] { model.forward(tokens); });
  CHECK(reasons(conversion) ==
        std::map<std::string, std::string>{{"words.weight", "aten::embedding"},
                                           {"up.weight", ""},
                                           {"up.bias", "aten::add_.Tensor"},
                                           {"norm.weight", "aten::layer_norm"},
                                           {"norm.bias", "aten::layer_norm"},
                                           {"down.weight", ""},
                                           {"spare.weight", "not used"},
                                           {"spare.bias", "not used"},
                                           {"shift", "aten::add.Tensor"}});
  CHECK(conversion.bytes_before - conversion.bytes_after == 2 * (16 * 8 + 8 * 16));
  CHECK(weight.scalar_type() == dtype);  // the same tensor, in place
  CHECK(model.words->weight.scalar_type() == c10::kFloat);
  const AutocastGuard region(c10::kCPU, dtype);
  const fastamp::Trace trace;
  CHECK(at::equal(model.forward(tokens), expected));
  CHECK(trace.totals().weight_casts == 1);  // of the embedding
}

TEST_CASE("Without a forward pass the types of modules decide") {
  torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::Linear(8, 8),
                              torch::nn::PReLU(), torch::nn::ConvTranspose1d(4, 4, 3));
  const auto found = reasons(fastamp::convert(*model, c10::kBFloat16));
  CHECK(found.at("0.weight").empty());
  CHECK(found.at("0.bias").empty());
  CHECK(!found.at("1.bias").empty());  // added to products of inputs that are no matrices
  CHECK(!found.at("2.weight").empty());
  CHECK(found.at("3.weight").empty());
}

TEST_CASE("By types too, a weight that another module has stays") {
  Model model;
  const auto found = reasons(fastamp::convert(model, c10::kHalf));
  CHECK(!found.at("words.weight").empty());
  CHECK(!found.at("shift").empty());
  CHECK(found.at("spare.weight").empty());
}

TEST_CASE("By types, the policies in force count") {
  const fastamp::OpPolicyGuard lists({{"conv2d", fastamp::OpPolicy::kFp32}});
  torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::Linear(8, 8));
  const auto found = reasons(fastamp::convert(*model, c10::kBFloat16));
  CHECK(!found.at("0.weight").empty());
  CHECK(found.at("1.weight").empty());
}

TEST_CASE("A conversion prints what it did") {
  Model model;
  std::ostringstream out;
  out << fastamp::convert(model, c10::kBFloat16);
  CHECK(out.str().find("3 of 9 parameters in BFloat16") == 0);
  CHECK(out.str().find("stays: words.weight (") != std::string::npos);
}

TEST_CASE("What cannot be converted is refused, and nothing changes") {
  Model model;
  CHECK_THROWS_AS(fastamp::convert(model, c10::kDouble), c10::ValueError);
  CHECK_THROWS_WITH(
      fastamp::convert(model, c10::kDouble),
      Catch::StartsWith("convert: expected dtype to be float16 or bfloat16, got Double"));
  torch::nn::Sequential empty(torch::nn::ReLU{});
  CHECK_THROWS_WITH(fastamp::convert(*empty, c10::kHalf),
                    Catch::StartsWith("convert: expected a module with parameters, got none"));
  const auto failing = [] { throw std::runtime_error("from forward"); };
  CHECK_THROWS_WITH(fastamp::convert(model, c10::kHalf, failing), "from forward");
  for (const auto& parameter : model.parameters()) {
    CHECK(parameter.scalar_type() == c10::kFloat);
  }
  // And the failed pass left no watcher behind.
  CHECK_NOTHROW(
      fastamp::convert(model, c10::kHalf, [&] { model.forward(at::zeros({1, 2}, c10::kLong)); }));
  torch::nn::Module spread;
  spread.register_parameter("here", at::ones({2}));
  spread.register_parameter("there", at::ones({2}, c10::Device(c10::kMeta)));
  CHECK_THROWS_WITH(fastamp::convert(spread, c10::kHalf), Catch::Contains("on one device"));
}

TEST_CASE("A preset names the ops in which two devices differ, and copies what is in force") {
  for (const auto& edit : fastamp::policy_preset(c10::kCUDA, c10::kCPU)) {
    CHECK(edit.device == c10::kCPU);
    CHECK(fastamp::op_policy(edit.op, c10::kCPU) != edit.policy);
    CHECK(fastamp::op_policy(edit.op, c10::kCUDA) == edit.policy);
  }
  CHECK(fastamp::policy_preset(c10::kCPU, c10::kCPU).empty());
  const fastamp::OpPolicyGuard edit({{"mm", fastamp::OpPolicy::kFp32, c10::kCUDA}});
  const fastamp::OpPolicyGuard lists(fastamp::policy_preset(c10::kCUDA, c10::kCPU));
  CHECK(fastamp::op_policy("mm", c10::kCPU) == fastamp::OpPolicy::kFp32);
  CHECK(fastamp::policy_preset(c10::kCUDA, c10::kCPU).empty());
  CHECK_THROWS_AS(fastamp::policy_preset(c10::kMeta, c10::kCPU), c10::ValueError);
}
