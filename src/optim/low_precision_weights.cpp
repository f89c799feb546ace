// SPDX-License-Identifier: Apache-2.0
#include "autocast/weight_aliases.h"
#include "inference/convert.h"
#include "optim/starting_masters.h"

#include <fastamp/optim/low_precision_weights.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <fnmatch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fastamp::optim {
namespace {

using autocast::LoweredWeight;

bool fits(const std::string& name, const std::string& pattern) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

void keep(std::vector<LoweredWeight>& weights, const std::vector<std::string>& patterns) {
  for (const auto& pattern : patterns) {
    bool found = false;
    for (auto& weight : weights) {
      if (fits(weight.name, pattern)) {
        found = true;
        weight.reason = weight.reason.empty() ? "kept" : weight.reason;
      }
    }
    TORCH_CHECK_VALUE(
        found, "low_precision_weights_: expected keep to have patterns of parameters' names, got '",
        pattern, "', which fits none.");
  }
}

/// torch.amp casts each use of a view apart, and so sums their gradients in float32. Autograd does
/// so for gradients that are held in float32, if there are no other uses, which it sums in 16 bits.
void refuse_views(std::vector<LoweredWeight>& weights, const LowPrecisionWeightsOptions& options) {
  const int most = options.grads() == c10::kFloat ? std::numeric_limits<int>::max() : 1;
  for (auto& weight : weights) {
    const bool is_mixed = weight.casts > 0 && weight.other_casts > 0;
    if (weight.reason.empty() && (is_mixed || weight.other_casts > most)) {
      weight.reason = "several uses, some of views";
    }
  }
}

/// Calls what torch has from 2.10 on; a template, so that it need not be there.
template <typename Tensor>
constexpr bool kHasGradDtype =
    requires(const Tensor& tensor) { tensor.set_grad_dtype(std::optional(c10::kFloat)); };

/// Data that a low-precision weight has with it until its end.
struct LowPrecisionWeightHook : torch::autograd::PostAccumulateGradHook {
  LowPrecisionWeightHook(const at::Tensor& weight, bool widens_grad)
      : impl(weight.unsafeGetTensorImpl()), widens(widens_grad) {}
  ~LowPrecisionWeightHook() override { forget_starting_master(impl); }
  LowPrecisionWeightHook(const LowPrecisionWeightHook&) = delete;
  LowPrecisionWeightHook& operator=(const LowPrecisionWeightHook&) = delete;
  LowPrecisionWeightHook(LowPrecisionWeightHook&&) = delete;
  LowPrecisionWeightHook& operator=(LowPrecisionWeightHook&&) = delete;

  /// Casts what backward has summed in 16 bits, outside of regions. Later passes are then added to
  /// it in float32.
  void operator()(const torch::autograd::Variable& weight) override {
    at::Tensor& grad = weight.mutable_grad();
    if (widens && grad.defined() && grad.scalar_type() != c10::kFloat) {
      grad = grad.to(c10::kFloat);
    }
  }

  const c10::TensorImpl* impl;
  bool widens;
};

template <typename Tensor>
void take_any_grad(const Tensor& weight) {
  if constexpr (kHasGradDtype<Tensor>) {
    weight.set_grad_dtype(std::nullopt);
  }
}

/// Gives weights their values back, and takes away what they got, unless told to forget them.
class WeightsAsTheyWere {
 public:
  explicit WeightsAsTheyWere(const std::vector<LoweredWeight>& weights) {
    before_.reserve(weights.size());
    for (const auto& weight : weights) {
      before_.emplace_back(weight.tensor, weight.tensor.data());
    }
  }
  ~WeightsAsTheyWere() {
    for (const auto& [weight, data] : before_) {
      if (weight.scalar_type() != data.scalar_type()) {
        if (weight.requires_grad()) {
          auto& hook = torch::autograd::impl::post_acc_grad_hooks(weight);
          if (dynamic_cast<LowPrecisionWeightHook*>(hook.get()) != nullptr) {
            hook.reset();
          }
        }
        forget_starting_master(weight.unsafeGetTensorImpl());
        weight.set_data(data);
      }
    }
  }
  WeightsAsTheyWere(const WeightsAsTheyWere&) = delete;
  WeightsAsTheyWere& operator=(const WeightsAsTheyWere&) = delete;
  WeightsAsTheyWere(WeightsAsTheyWere&&) = delete;
  WeightsAsTheyWere& operator=(WeightsAsTheyWere&&) = delete;

  void forget() { before_.clear(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

void check_grads(const std::vector<LoweredWeight>& weights,
                 const LowPrecisionWeightsOptions& options) {
  TORCH_CHECK_VALUE(options.grads() == c10::kFloat || options.grads() == options.dtype(),
                    "low_precision_weights_: expected grads to be float32 or ", options.dtype(),
                    ", got ", options.grads(), ".");
  TORCH_CHECK_NOT_IMPLEMENTED(kHasGradDtype<at::Tensor> || options.grads() != c10::kFloat,
                              "low_precision_weights_: expected a torch whose tensors have "
                              "set_grad_dtype() for grads in float32, got one "
                              "without it. Use LowPrecisionWeightsOptions().grads(",
                              options.dtype(), ").");
  const auto has_grad = [](const LoweredWeight& weight) { return weight.tensor.grad().defined(); };
  const auto found = std::ranges::find_if(weights, has_grad);
  TORCH_CHECK_VALUE(found == weights.end(),
                    "low_precision_weights_: expected parameters without gradients, got one of ",
                    found == weights.end() ? "" : found->name, ". Call zero_grad() first.");
}

}  // namespace

Conversion low_precision_weights_(torch::nn::Module& module,
                                  const LowPrecisionWeightsOptions& options) {
  auto weights = autocast::find_lowered_weights("low_precision_weights_", module, options.dtype(),
                                                options.forward());
  refuse_views(weights, options);
  keep(weights, options.keep());
  check_grads(weights, options);
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> masters;
  for (const auto& weight : weights) {
    if (weight.reason.empty() && weight.tensor.requires_grad()) {
      params.push_back(weight.tensor);
      masters.push_back(weight.tensor.data());
    }
  }
  const bool widens = options.grads() == c10::kFloat;
  WeightsAsTheyWere before(weights);
  auto done = autocast::lower_weights(weights, options.dtype());
  set_starting_masters(params, masters);
  for (const auto& param : params) {
    torch::autograd::impl::set_post_acc_grad_hooks(
        param, std::make_unique<LowPrecisionWeightHook>(param, widens));
  }
  if (widens) {
    autocast::mark_low_precision_weights(params);
    std::ranges::for_each(params, take_any_grad<at::Tensor>);
  }
  before.forget();
  return done;
}

}  // namespace fastamp::optim
