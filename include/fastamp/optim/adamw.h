#pragma once

#include <fastamp/export.h>
#include <fastamp/optim/adam.h>

#include <memory>
#include <vector>

namespace fastamp::autocast {
class Shadows;
}  // namespace fastamp::autocast

namespace fastamp::optim {

/// Options of a parameter group of AdamW; every setter returns the object.
///
/// Source: torch::optim::AdamWOptions, with its names and defaults; the last three are ours.
struct FASTAMP_API AdamWOptions : torch::optim::OptimizerCloneableOptions<AdamWOptions> {
  using betas_t = std::tuple<double, double>;
  AdamWOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(*-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
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

/// torch::optim::AdamW in one fused pass over all groups; all else is as with Adam.
// NOLINTNEXTLINE(misc-multiple-inheritance): the gate is a mixin over LibTorch's class
class FASTAMP_API AdamW : public torch::optim::Optimizer, public GatedOptimizer {
 public:
  /// @throws c10::Error  as Adam.
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
  std::shared_ptr<autocast::Shadows> shadows_;
};

}  // namespace fastamp::optim
