// SPDX-License-Identifier: Apache-2.0
#include "autocast/api/lowered_weights.h"
#include "optim/starting_masters.h"

#include <fastamp/optim/lean.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <fnmatch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

namespace fastamp {
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
    TORCH_CHECK_VALUE(found, "lean: expected keep to have patterns of parameters' names, got '",
                      pattern, "', which fits none.");
  }
}

/// torch.amp casts each use of a view apart, and so sums their gradients in float32. Autograd does
/// so for gradients that are held in float32, if there are no other uses, which it sums in 16 bits.
void refuse_views(std::vector<LoweredWeight>& weights, const LeanOptions& options) {
  const int most = options.grads() == c10::kFloat ? std::numeric_limits<int>::max() : 1;
  for (auto& weight : weights) {
    const bool is_mixed = weight.casts > 0 && weight.other_casts > 0;
    if (weight.reason.empty() && (is_mixed || weight.other_casts > most)) {
      weight.reason = "several uses, some of views";
    }
  }
}

/// What torch has from 2.10 on; a template, so that it need not be there.
template <typename Tensor>
constexpr bool kHasGradDtype =
    requires(const Tensor& tensor) { tensor.set_grad_dtype(std::optional(c10::kFloat)); };

/// Casts what one backward pass has summed in 16 bits, as the cast of a float32 weight does that is
/// used several times. Later passes are then added to it in float32.
struct WidenGrad : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& parameter) override {
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined() && grad.scalar_type() != c10::kFloat) {
      grad = grad.to(c10::kFloat);
    }
  }
};

template <typename Tensor>
void hold_grads_in_float(const Tensor& parameter, bool sums_in_16_bits) {
  if constexpr (kHasGradDtype<Tensor>) {
    if (sums_in_16_bits) {
      parameter.set_grad_dtype(std::nullopt);
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<WidenGrad>());
    } else {
      parameter.set_grad_dtype(std::optional(c10::kFloat));
    }
  }
}

void check_grads(const std::vector<LoweredWeight>& weights, const LeanOptions& options) {
  TORCH_CHECK_VALUE(options.grads() == c10::kFloat || options.grads() == options.dtype(),
                    "lean: expected grads to be float32 or ", options.dtype(), ", got ",
                    options.grads(), ".");
  TORCH_CHECK_NOT_IMPLEMENTED(
      kHasGradDtype<at::Tensor> || options.grads() != c10::kFloat,
      "lean: expected a torch whose tensors have set_grad_dtype() for grads in float32, got one "
      "without it. Use LeanOptions().grads(",
      options.dtype(), ").");
  const auto has_grad = [](const LoweredWeight& weight) { return weight.tensor.grad().defined(); };
  const auto found = std::ranges::find_if(weights, has_grad);
  TORCH_CHECK_VALUE(found == weights.end(),
                    "lean: expected parameters without gradients, got one of ",
                    found == weights.end() ? "" : found->name, ". Call zero_grad() first.");
}

}  // namespace

Conversion lean(torch::nn::Module& module, const LeanOptions& options) {
  auto weights = autocast::find_lowered_weights("lean", module, options.dtype(), options.forward());
  refuse_views(weights, options);
  keep(weights, options.keep());
  check_grads(weights, options);
  std::vector<at::Tensor> params;
  std::vector<bool> is_summed;
  std::vector<at::Tensor> masters;
  for (const auto& weight : weights) {
    if (weight.reason.empty() && weight.tensor.requires_grad()) {
      params.push_back(weight.tensor);
      is_summed.push_back(weight.casts > 1);
      masters.push_back(weight.tensor.data());
    }
  }
  auto done = autocast::lower_weights(weights, options.dtype());
  optim::set_starting_masters(params, masters);
  for (std::size_t i = 0; i < params.size() && options.grads() == c10::kFloat; ++i) {
    hold_grads_in_float(params[i], is_summed[i]);
  }
  return done;
}

}  // namespace fastamp
