// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step_optimizer.h>
#include <fastamp/optim/muon_rate.h>
#include <fastamp/optim/stored_state.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

namespace fastamp::autocast {
class WeightCopies;
}  // namespace fastamp::autocast

namespace fastamp::optim {

/// Options of a parameter group of Muon, with the names and defaults of torch.optim.Muon and four
/// more; every setter returns the object.
struct FASTAMP_API MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 1e-3);  // NOLINT(*-explicit-constructor): as LibTorch's options

  TORCH_ARG(double, lr) = 1e-3;
  /// Decoupled: lr * weight_decay of the weight goes in each step.
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  using Coefficients = std::tuple<double, double, double>;
  /// Coefficients of the Newton-Schulz iteration x <- a x + b (x x') x + c (x x')^2 x.
  TORCH_ARG(Coefficients, ns_coefficients) = { 3.4445, -4.7750, 2.0315 };
  /// The least norm that a matrix is divided by.
  TORCH_ARG(double, eps) = 1e-7;
  /// Iterations, less than 100.
  TORCH_ARG(std::int64_t, ns_steps) = 5;
  TORCH_ARG(MuonRate, adjust_lr_fn) = MuonRate::kOriginal;
  /// Dtype of the iteration: kBFloat16, kHalf (with both, sums within a product are fp32) or
  /// kFloat.
  TORCH_ARG(c10::ScalarType, ns_dtype) = c10::kBFloat16;
  /// Dtype of the momentum buffers: kFloat or kBFloat16.
  TORCH_ARG(c10::ScalarType, state_dtype) = c10::kFloat;
  /// Storage of the masters of 16-bit parameters.
  TORCH_ARG(MasterStorage, master) = MasterStorage::kFloat;
  /// Dtype of casts, as SGDOptions::autocast_dtype.
  TORCH_ARG(c10::ScalarType, autocast_dtype) = c10::ScalarType::Undefined;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// State of a parameter; tensors that it does not need are undefined.
struct FASTAMP_API MuonParamState : torch::optim::OptimizerCloneableParamState<MuonParamState> {
  /// Buffer of the parameter's shape and of state_dtype; zeros before the first step.
  TORCH_ARG(at::Tensor, momentum_buffer);
  /// float32, one element, on the parameter's device: steps that a bfloat16 buffer has seen, of
  /// which its noise is made.
  TORCH_ARG(at::Tensor, steps);
  /// float32: the weights that a 16-bit parameter is rounded from, with MasterStorage::kFloat.
  TORCH_ARG(at::Tensor, master);
  /// int16: what the parameter lacks of them, with MasterStorage::kRemainder.
  TORCH_ARG(at::Tensor, remainder);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Reads the step counter: waits for the device.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch.optim.Muon, which LibTorch does not have: momentum, made orthogonal by a Newton-Schulz
/// iteration, for matrices (docs/optim.md).
///
/// All matrices go through two fused passes (fastamp::ops::muon_momentum_, muon_apply_); between
/// them the iteration runs on batches of those of equal shape. AmpStep, masters, remainders, weight
/// copies,
/// learning rates on the device and checkpoints are as in SGD. A step that an AmpStep skips
/// changes nothing but the gradients; on a device that is decided there, and nothing waits.
///
/// Parameters are matrices, float32, float16 or bfloat16, on cpu or cuda, with dense gradients.
class FASTAMP_API Muon  // NOLINT(misc-multiple-inheritance): AmpStepOptimizer is a mixin
    : public torch::optim::Optimizer,
      public AmpStepOptimizer {
 public:
  /// @throws c10::Error if an option is out of its range, or a parameter undefined.
  /// @throws c10::TypeError if a group has options of another optimizer, or a parameter is of
  ///     another dtype, layout or device.
  /// @throws c10::ValueError if a parameter has not two dimensions.
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                const MuonOptions& defaults = {});
  explicit Muon(std::vector<at::Tensor> params, const MuonOptions& defaults = {});

  /// Adds a group as SGD::add_param_group does.
  /// @throws c10::TypeError, c10::ValueError as the constructors. Nothing was changed.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): see SGD
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// @returns what the closure returned; undefined without one.
  /// @throws c10::TypeError, c10::ValueError for a sparse gradient, parameters that became others,
  ///     and what ops::muon_momentum_ and muon_apply_ refuse. No parameter was changed.
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Replaces the state of all parameters and the options of all groups, but for state_dtype,
  /// master and ns_dtype of groups where these are not as in new options. State tensors go to the
  /// device of their parameter and to state_dtype.
  /// @throws c10::Error if the archive is not that of a Muon over as many groups and parameters of
  ///     the same shapes. Nothing was changed.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<autocast::WeightCopies> copies_;
};

}  // namespace fastamp::optim
