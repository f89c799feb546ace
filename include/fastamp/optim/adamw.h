// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/export.h>
#include <fastamp/optim/gated_optimizer.h>
#include <fastamp/optim/stored_state.h>
#include <fastamp/optim/torch_arg.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/adamw.h>  // wide include: our options derive from its
#include <torch/optim/optimizer.h>

#include <memory>
#include <tuple>
#include <vector>

namespace fastamp::autocast {
class WeightCopies;
}  // namespace fastamp::autocast

namespace fastamp::optim {

/// Options of a parameter group of AdamW: torch::optim::AdamWOptions and five more, as in
/// AdamOptions.
struct FASTAMP_API AdamWOptions : torch::optim::AdamWOptions {
  using Torch = torch::optim::AdamWOptions;
  using betas_t = std::tuple<double, double>;

  AdamWOptions(double lr = 1e-3) : Torch(lr) {}  // NOLINT(*-explicit-constructor): as LibTorch's
  AdamWOptions(const Torch& options)             // NOLINT(*-explicit-constructor): a ported program
      : Torch(options) {}

  // NOLINTBEGIN(bugprone-derived-method-shadowing-base-method): the setters return this class
  FASTAMP_TORCH_ARG(double, lr)
  FASTAMP_TORCH_ARG(betas_t, betas)
  FASTAMP_TORCH_ARG(double, eps)
  FASTAMP_TORCH_ARG(double, weight_decay)
  FASTAMP_TORCH_ARG(bool, amsgrad)
  // NOLINTEND(bugprone-derived-method-shadowing-base-method)
  /// Goes up the gradient instead of down.
  TORCH_ARG(bool, maximize) = false;
  /// Dtype of the moments and their rounding: as in AdamOptions.
  TORCH_ARG(c10::ScalarType, state_dtype) = c10::kFloat;
  TORCH_ARG(StateRounding, state_rounding) = StateRounding::kStochastic;
  /// How the masters of 16-bit parameters are kept.
  TORCH_ARG(MasterStorage, master) = MasterStorage::kFloat;
  /// Dtype of the autocast regions, kBFloat16, kHalf or kFloat8_e4m3fn: the step also writes the
  /// casts of weights that autocast will use. Undefined for none.
  TORCH_ARG(c10::ScalarType, autocast_dtype) = c10::ScalarType::Undefined;

 public:
  // NOLINTNEXTLINE(misc-override-with-different-visibility): LibTorch calls it through its base
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  friend bool operator==(const AdamWOptions& left, const AdamWOptions& right) {
    return static_cast<const Torch&>(left) == static_cast<const Torch&>(right) &&
           left.maximize_ == right.maximize_ && left.state_dtype_ == right.state_dtype_ &&
           left.state_rounding_ == right.state_rounding_ && left.master_ == right.master_ &&
           left.autocast_dtype_ == right.autocast_dtype_;
  }
};

/// State of a parameter of AdamW: like AdamParamState.
struct FASTAMP_API AdamWParamState : torch::optim::AdamWParamState {
  using Torch = torch::optim::AdamWParamState;
  /// float32, one element, on the parameter's device: steps that the moments have seen.
  TORCH_ARG(at::Tensor, steps);
  /// float32: the weights that a 16-bit parameter is rounded from, with MasterStorage::kFloat.
  TORCH_ARG(at::Tensor, master);
  /// int16: what the parameter lacks of them, with MasterStorage::kRest.
  TORCH_ARG(at::Tensor, rest);
  /// uint8: the scales of moments that are codes of 8 bits (EncodedMoments). Else undefined.
  TORCH_ARG(at::Tensor, moment_scales);

 public:
  // NOLINTNEXTLINE(misc-override-with-different-visibility): LibTorch calls it through its base
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Reads the step counter: waits for the device.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch::optim::AdamW in one fused pass over all groups; all else is as with Adam.
// NOLINTNEXTLINE(misc-multiple-inheritance): the gate is a mixin over LibTorch's class
class FASTAMP_API AdamW : public torch::optim::Optimizer, public GatedOptimizer {
 public:
  /// Warns and throws as Adam.
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 const AdamWOptions& defaults = {});
  explicit AdamW(std::vector<at::Tensor> params, const AdamWOptions& defaults = {});

  /// As SGD::add_param_group.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): see SGD's
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// As Adam::step.
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  /// As SGD::load.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<autocast::WeightCopies> copies_;
};

}  // namespace fastamp::optim
