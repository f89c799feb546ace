// SPDX-License-Identifier: Apache-2.0
// low_precision_weights_(): weights in 16 bits train as float32 weights do.

#include "optim/starting_masters.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/low_precision_weights.h>
#include <fastamp/optim/stored_state.h>

#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randint.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::optim::LowPrecisionWeightsOptions;
namespace optim = fastamp::optim;

namespace {

/// A weight that is used twice, one whose views are, one that is used in both ways, and a norm.
struct Model : torch::nn::Module {
  Model() {
    register_module("words", words);
    register_module("twice", twice);
    register_module("norm", norm);
    register_module("views", views);
    register_module("tied", tied);
    register_module("head", head);
  }

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = words(tokens);
    // Not by Linear, which multiplies by a view of its weight.
    x = norm(at::linear(at::linear(x, twice->weight).relu(), twice->weight));
    x = views(views(x).relu());
    return head(at::matmul(at::linear(x, tied->weight), tied->weight.t()));
  }

  torch::nn::Embedding words{20, 8};
  torch::nn::Linear twice{torch::nn::LinearOptions(8, 8).bias(false)};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
  torch::nn::Linear views{torch::nn::LinearOptions(8, 8).bias(false)};
  torch::nn::Linear tied{torch::nn::LinearOptions(8, 8).bias(false)};
  torch::nn::Linear head{torch::nn::LinearOptions(8, 4).bias(false)};
};

struct Batch {
  at::Tensor tokens = at::randint(20, {6, 5}, c10::kLong);
  at::Tensor targets = at::randint(4, {30}, c10::kLong);
};

/// Losses of steps that each sum the gradients of two passes.
std::vector<float> train(Model& model, torch::optim::Optimizer& optimizer, const Batch& batch) {
  std::vector<float> losses;
  for (int pass = 0; pass < 6; ++pass) {
    at::Tensor loss;
    {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      loss = torch::nn::functional::cross_entropy(model.forward(batch.tokens).view({30, 4}),
                                                  batch.targets);
    }
    loss.backward();
    losses.push_back(loss.item<float>());
    if (pass % 2 == 1) {
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  return losses;
}

std::map<std::string, std::string> reasons(const fastamp::Conversion& conversion) {
  std::map<std::string, std::string> found;
  for (const auto& parameter : conversion.parameters) {
    found[parameter.name] = parameter.reason;
  }
  return found;
}

at::Tensor master_of(optim::AdamW& optimizer, const at::Tensor& parameter) {
  const auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
  const auto& own = static_cast<const optim::AdamWParamState&>(state);
  return own.remainder().defined() ? optim::master_from_remainder(parameter, own.remainder())
                                   : own.master();
}

LowPrecisionWeightsOptions by_forward(Model& model, const Batch& batch) {
  return LowPrecisionWeightsOptions(c10::kBFloat16).forward([&model, &batch] {
    model.forward(batch.tokens);
  });
}

}  // namespace

TEST_CASE("Low-precision weights train with the losses and masters of float32 weights") {
  const auto remainders = GENERATE(false, true);
  const Batch batch;
  torch::manual_seed(0);
  Model plain;
  torch::manual_seed(0);
  Model model;
  CHECK(reasons(fastamp::optim::low_precision_weights_(model, by_forward(model, batch))) ==
        std::map<std::string, std::string>{{"words.weight", "aten::embedding"},
                                           {"twice.weight", ""},
                                           {"norm.weight", "aten::layer_norm"},
                                           {"norm.bias", "aten::layer_norm"},
                                           {"views.weight", ""},
                                           {"tied.weight", "several uses, some of views"},
                                           {"head.weight", ""}});
  optim::AdamW libtorch(plain.parameters(), optim::AdamWOptions(1e-2));
  optim::AdamW fast(model.parameters(),
                    optim::AdamWOptions(1e-2).master(remainders ? optim::MasterStorage::kRemainder
                                                                : optim::MasterStorage::kFloat));
  CHECK(train(model, fast, batch) == train(plain, libtorch, batch));
  for (const auto* layer : {"twice.weight", "views.weight", "head.weight"}) {
    const auto parameter = model.named_parameters()[layer];
    const auto expected = plain.named_parameters()[layer].detach();
    CHECK(parameter.scalar_type() == c10::kBFloat16);
    CHECK(at::equal(parameter.detach(), expected.to(c10::kBFloat16)));
    if (!remainders) {
      CHECK(at::equal(master_of(fast, parameter), expected));
    } else {
      CHECK((master_of(fast, parameter) - expected).abs().max().item<float>() < 1e-7F);
    }
  }
}

TEST_CASE("No region casts a low-precision weight, and gradients have the dtype asked for") {
  const auto grads = GENERATE(c10::kFloat, c10::kBFloat16);
  const Batch batch;
  Model model;
  fastamp::optim::low_precision_weights_(model, by_forward(model, batch).grads(grads));
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const fastamp::Trace trace;
  model.forward(batch.tokens).sum().backward();
  CHECK(trace.totals().weight_casts == (grads == c10::kFloat ? 1 : 2));  // of those that stay
  CHECK(model.twice->weight.grad().scalar_type() == grads);
  CHECK(model.head->weight.grad().scalar_type() == grads);
}

TEST_CASE("What low_precision_weights_() refuses it leaves as it was") {
  const Batch batch;
  Model model;
  CHECK_THROWS_WITH(
      fastamp::optim::low_precision_weights_(model, c10::kDouble),
      Catch::StartsWith("low_precision_weights_: expected dtype to be float16 or bfloat16"));
  CHECK_THROWS_WITH(
      fastamp::optim::low_precision_weights_(model, LowPrecisionWeightsOptions().grads(c10::kHalf)),
      Catch::StartsWith(
          "low_precision_weights_: expected grads to be float32 or BFloat16, got Half"));
  CHECK_THROWS_WITH(fastamp::optim::low_precision_weights_(
                        model, LowPrecisionWeightsOptions().keep({"nothing.*"})),
                    Catch::Contains("got 'nothing.*', which fits none"));
  model.head->weight.mutable_grad() = at::zeros({4, 8});
  CHECK_THROWS_WITH(fastamp::optim::low_precision_weights_(model),
                    Catch::Contains("got one of head.weight"));
  for (const auto& parameter : model.parameters()) {
    CHECK(parameter.scalar_type() == c10::kFloat);
  }
  model.zero_grad();
  const auto found = reasons(
      fastamp::optim::low_precision_weights_(model, LowPrecisionWeightsOptions().keep({"head.*"})));
  CHECK(found.at("head.weight") == "kept");
  CHECK(found.at("twice.weight").empty());
}

TEST_CASE("Modules that are called several times train with the masters of float32 weights") {
  const Batch batch;
  const auto several_regions = GENERATE(false, true);
  std::vector<at::Tensor> gradients;
  for (const bool is_low_precision_weight : {false, true}) {
    torch::manual_seed(0);
    Model model;
    if (is_low_precision_weight) {
      fastamp::optim::low_precision_weights_(
          model);  // By types: nothing shows how often a weight is used.
    }
    std::vector<at::Tensor> outputs;
    std::optional<AutocastGuard> region;
    for (int call = 0; call < 2; ++call) {
      if (several_regions || call == 0) {
        region.reset();
        region.emplace(c10::kCPU, c10::kBFloat16);
      }
      outputs.push_back(model.forward(batch.tokens).to(c10::kFloat).square().mean());
    }
    region.reset();
    (outputs[0] + 2 * outputs[1]).backward();
    gradients.push_back(model.head->weight.grad());
    gradients.push_back(model.twice->weight.grad());
    gradients.push_back(model.views->weight.grad());
  }
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(gradients[i + 3].scalar_type() == c10::kFloat);
    CHECK(at::equal(gradients[i + 3], gradients[i]));
  }
}

TEST_CASE("What is written before the first step counts, and is saved with what was not stepped") {
  const auto remainders = GENERATE(false, true);
  const auto options = optim::AdamWOptions(1e-2).master(
      remainders ? optim::MasterStorage::kRemainder : optim::MasterStorage::kFloat);
  torch::manual_seed(0);
  Model model;
  const auto value = model.head->weight.detach().clone();
  fastamp::optim::low_precision_weights_(model);
  optim::AdamW optimizer(model.parameters(), options);
  {
    const at::NoGradGuard no_grad;
    model.head->weight[0].fill_(3);
    value[0].fill_(3);
  }
  std::stringstream saved;
  torch::save(optimizer, saved);
  CHECK(optimizer.state().empty());
  Model other;
  fastamp::optim::low_precision_weights_(other);
  optim::AdamW resumed(other.parameters(), options);
  {
    const at::NoGradGuard no_grad;
    other.head->weight.copy_(model.head->weight);
  }
  torch::load(resumed, saved);
  const auto master = master_of(resumed, other.head->weight);
  CHECK(at::equal(master[0], value[0]));
  CHECK((master - value).abs().max().item<float>() <= (remainders ? 1e-7F : 0.0F));
  CHECK_FALSE(optim::starting_master_of(other.head->weight).defined());
}

TEST_CASE("A master counts where the parameter is still it rounded") {
  const auto master = at::rand({4}) + 1;
  const auto param = master.to(c10::kBFloat16);
  param[1] = 3;
  const auto current = optim::current_master(param, master);
  CHECK(current[1].item<float>() == 3.0F);
  CHECK(at::equal(current[0], master[0]));
  CHECK_THROWS_WITH(optim::current_master(param, at::zeros({3})),
                    Catch::StartsWith("current_master: expected master of shape [4]"));
}

TEST_CASE("Masters end with their parameters, and with their training") {
  const auto grads = GENERATE(c10::kFloat, c10::kBFloat16);
  {
    Model model;
    fastamp::optim::low_precision_weights_(model, LowPrecisionWeightsOptions().grads(grads));
    CHECK_FALSE(optim::with_starting_masters().empty());
  }
  CHECK(optim::with_starting_masters().empty());
  Model model;
  fastamp::optim::low_precision_weights_(model, LowPrecisionWeightsOptions().grads(grads));
  model.head->weight.set_requires_grad(false);
  const optim::AdamW optimizer(model.parameters(), optim::AdamWOptions(1e-2));
  CHECK_FALSE(optim::starting_master_of(model.head->weight).defined());
  CHECK(optim::starting_master_of(model.twice->weight).defined());
}

namespace {

/// Lets go of its tensor when that is asked whether it is trained, as another thread may at that
/// moment; asks for a master as it ends, as code of users may.
struct Leaving final : torch::autograd::AutogradMeta {
  Leaving(at::Tensor& own_tensor, const at::Tensor& other_tensor, bool& other_has_one)
      : own(own_tensor), other(other_tensor), found(other_has_one) {}
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;
  ~Leaving() override { found = optim::kept_starting_master(other).defined(); }

  bool requires_grad() const override {
    own.reset();
    return true;
  }

  at::Tensor& own;
  at::Tensor other;
  bool& found;
};

}  // namespace

TEST_CASE("A parameter that ends while starting masters are looked through may ask for one") {
  auto leaving = at::ones({2});
  const auto staying = at::ones({2}).requires_grad_();
  optim::set_starting_masters({leaving, staying}, {at::ones({2}), at::ones({2})});
  bool found = false;
  leaving.unsafeGetTensorImpl()->set_autograd_meta(
      std::make_unique<Leaving>(leaving, staying, found));
  optim::forget_frozen_starting_masters();
  CHECK_FALSE(leaving.defined());
  CHECK(found);
  optim::forget_starting_master(staying.unsafeGetTensorImpl());
  optim::forget_frozen_starting_masters();
  CHECK(optim::with_starting_masters().empty());
}
