#pragma once

#include <fastamp/export.h>
#include <fastamp/optim/gated_optimizer.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

namespace fastamp::autocast {
class Shadows;
}  // namespace fastamp::autocast

namespace fastamp::optim {

/// Options of a parameter group of Adam; every setter returns the object.
///
/// Source: torch::optim::AdamOptions, with its names and defaults; the last three are ours.
struct FASTAMP_API AdamOptions : torch::optim::OptimizerCloneableOptions<AdamOptions> {
  using betas_t = std::tuple<double, double>;
  AdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(*-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, amsgrad) = false;
  /// Goes up the gradient instead of down.
  TORCH_ARG(bool, maximize) = false;
  /// Dtype of the moments: kFloat or kBFloat16.
  TORCH_ARG(c10::ScalarType, state_dtype) = c10::kFloat;
  /// Dtype of shadows, the casts of weights that the step writes: kBFloat16 or kHalf, that of the
  /// regions; Undefined for none.
  TORCH_ARG(c10::ScalarType, shadow_dtype) = c10::ScalarType::Undefined;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

/// State of a parameter of Adam or AdamW. Tensors that it has no use for are undefined.
struct FASTAMP_API AdamParamState : torch::optim::OptimizerCloneableParamState<AdamParamState> {
  /// float32, one element, on the parameter's device: steps that the moments have seen.
  TORCH_ARG(at::Tensor, steps);
  /// The moments are of the parameter's shape and of state_dtype.
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, max_exp_avg_sq);
  /// float32: the weights that a 16-bit parameter is rounded from.
  TORCH_ARG(at::Tensor, master);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Reads the step counter: waits for the device.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch::optim::Adam in one fused pass over all groups (fastamp::ops::fused_adamw_).
///
/// What fastamp::optim::SGD says of groups, schedulers, checkpoints, dtypes and the scaler holds
/// here too; sparse gradients are refused, as torch::optim::Adam refuses them. The step counter
/// lives on the device, where a skipped step leaves it as it is.
///
/// Source: torch::optim::Adam (2.11); the arithmetic is that of torch.optim.Adam, whose rounding
/// differs from LibTorch's in the last bits, see docs/optim.md.
// NOLINTNEXTLINE(misc-multiple-inheritance): the gate is a mixin over LibTorch's class
class FASTAMP_API Adam : public torch::optim::Optimizer, public GatedOptimizer {
 public:
  /// @throws c10::Error if lr, eps or weight_decay is negative, a beta is outside [0, 1), or
  ///     state_dtype is neither kFloat nor kBFloat16.
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                const AdamOptions& defaults = {});
  explicit Adam(std::vector<at::Tensor> params, const AdamOptions& defaults = {});

  /// As SGD::add_param_group.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): see SGD's
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// @returns what the closure returned; undefined without one.
  /// @throws c10::TypeError, c10::ValueError for what ops::fused_adamw_ refuses, such as a float64
  ///     parameter. No parameter was changed.
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  /// As SGD::load.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<autocast::Shadows> shadows_;
};

}  // namespace fastamp::optim
