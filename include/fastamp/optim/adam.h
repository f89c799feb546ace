// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step_optimizer.h>
#include <fastamp/optim/stored_state.h>
#include <fastamp/optim/torch_arg.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/adam.h>   // wide include: our options derive from its
#include <torch/optim/adamw.h>  // wide include: AdamW's, of the same template
#include <torch/optim/optimizer.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

namespace fastamp::autocast {
class WeightCopies;
}  // namespace fastamp::autocast

namespace fastamp::optim {

/// Options of a parameter group of Adam, or of AdamW with its decoupled weight decay; every setter
/// returns the object.
///
/// LibTorch's options, with their names and defaults, and five more. Code written for
/// torch::optim::AdamOptions takes them, `static_cast<torch::optim::AdamOptions&>(group.options())`
/// included. An optimizer also takes torch::optim::AdamOptions: the five are then those of its
/// defaults.
template <bool kDecoupled>
struct FASTAMP_API AdamFamilyOptions
    : std::conditional_t<kDecoupled, torch::optim::AdamWOptions, torch::optim::AdamOptions> {
  using Torch =
      std::conditional_t<kDecoupled, torch::optim::AdamWOptions, torch::optim::AdamOptions>;
  using betas_t = std::tuple<double, double>;

  // NOLINTNEXTLINE(*-explicit-constructor): as LibTorch's
  AdamFamilyOptions(double lr = 1e-3) : Torch(lr) {}
  // NOLINTNEXTLINE(*-explicit-constructor): a ported program
  AdamFamilyOptions(const Torch& options) : Torch(options) {}

  // NOLINTBEGIN(bugprone-derived-method-shadowing-base-method): the setters return this class
  FASTAMP_TORCH_ARG(double, lr)
  FASTAMP_TORCH_ARG(betas_t, betas)
  FASTAMP_TORCH_ARG(double, eps)
  FASTAMP_TORCH_ARG(double, weight_decay)
  FASTAMP_TORCH_ARG(bool, amsgrad)
  // NOLINTEND(bugprone-derived-method-shadowing-base-method)
  /// Goes up the gradient instead of down.
  TORCH_ARG(bool, maximize) = false;
  /// Dtype of the moments: kFloat, kBFloat16, or kByte for codes of 8 bits (docs/optim.md). Those
  /// have matrices of 4096 elements or more whose rows are a multiple of 32; others, and all with
  /// amsgrad, then have bfloat16, rounded stochastically.
  TORCH_ARG(c10::ScalarType, state_dtype) = c10::kFloat;
  /// Rounding of bfloat16 moments. kNearest with a beta above 0.99 loses most changes of them:
  /// the optimizer warns of it.
  TORCH_ARG(StateRounding, state_rounding) = StateRounding::kStochastic;
  /// Storage of the masters of 16-bit parameters.
  TORCH_ARG(MasterStorage, master) = MasterStorage::kFloat;
  /// Dtype of the autocast regions, kBFloat16, kHalf or kFloat8_e4m3fn: the step also writes the
  /// casts of weights that autocast will use. Undefined for none.
  TORCH_ARG(c10::ScalarType, autocast_dtype) = c10::ScalarType::Undefined;

 public:
  // NOLINTNEXTLINE(misc-override-with-different-visibility): LibTorch calls it through its base
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  friend bool operator==(const AdamFamilyOptions& left, const AdamFamilyOptions& right) {
    return static_cast<const Torch&>(left) == static_cast<const Torch&>(right) &&
           left.maximize_ == right.maximize_ && left.state_dtype_ == right.state_dtype_ &&
           left.state_rounding_ == right.state_rounding_ && left.master_ == right.master_ &&
           left.autocast_dtype_ == right.autocast_dtype_;
  }
};

/// State of a parameter of Adam or AdamW; tensors that it does not need are undefined.
///
/// LibTorch's state, with moments of the parameter's shape and of state_dtype, and four more
/// tensors. step() is right only on the CPU, where the host knows whether a step was skipped;
/// elsewhere it stands still, and steps() is the count.
template <bool kDecoupled>
struct FASTAMP_API AdamFamilyParamState
    : std::conditional_t<kDecoupled, torch::optim::AdamWParamState, torch::optim::AdamParamState> {
  using Torch =
      std::conditional_t<kDecoupled, torch::optim::AdamWParamState, torch::optim::AdamParamState>;
  /// float32, one element, on the parameter's device: steps that the moments have seen.
  TORCH_ARG(at::Tensor, steps);
  /// float32: the weights that a 16-bit parameter is rounded from, with MasterStorage::kFloat.
  TORCH_ARG(at::Tensor, master);
  /// int16: what the parameter lacks of them, with MasterStorage::kRemainder.
  TORCH_ARG(at::Tensor, remainder);
  /// uint8: the scales of moments that are codes of 8 bits (EncodedMoments). Else undefined.
  TORCH_ARG(at::Tensor, moment_scales);

 public:
  // NOLINTNEXTLINE(misc-override-with-different-visibility): LibTorch calls it through its base
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Reads the step counter: waits for the device.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch::optim::Adam, or AdamW, in one fused pass over all groups (fastamp::ops::fused_adamw_).
///
/// Groups, schedulers, checkpoints, dtypes and the scaler work as in fastamp::optim::SGD; sparse
/// gradients are refused, as by torch::optim::Adam. The step counter lives on the device, where a
/// skipped step leaves it as it is.
///
/// Source: torch::optim::Adam, AdamW (2.11); the arithmetic is that of torch.optim, whose rounding
/// differs from LibTorch's in the last bits, see docs/optim.md.
// NOLINTBEGIN(misc-multiple-inheritance): AmpStepOptimizer is a mixin over LibTorch's class
template <bool kDecoupled>
class FASTAMP_API AdamFamily : public torch::optim::Optimizer, public AmpStepOptimizer {
 public:
  /// Warns if bfloat16 second moments are rounded to nearest and the second beta is above 0.99, in
  /// a group or the defaults.
  /// @throws c10::Error if lr, eps or weight_decay is negative, a beta is outside [0, 1),
  ///     state_dtype is not kFloat, kBFloat16 or kByte, or a parameter is undefined.
  /// @throws c10::TypeError if a group has options of another optimizer.
  explicit AdamFamily(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                      const AdamFamilyOptions<kDecoupled>& defaults = {});
  explicit AdamFamily(std::vector<at::Tensor> params,
                      const AdamFamilyOptions<kDecoupled>& defaults = {});

  /// Adds a group as SGD::add_param_group does.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): see SGD's
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// @returns what the closure returned; undefined without one.
  /// @throws c10::TypeError, c10::ValueError for what ops::fused_adamw_ refuses; c10::Error for a
  ///     sparse gradient. No parameter was changed.
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Loads as SGD::load does.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<autocast::WeightCopies> copies_;
};

extern template struct AdamFamilyOptions<false>;
extern template struct AdamFamilyOptions<true>;
extern template struct AdamFamilyParamState<false>;
extern template struct AdamFamilyParamState<true>;
extern template class AdamFamily<false>;
extern template class AdamFamily<true>;
// NOLINTEND(misc-multiple-inheritance)

using AdamOptions = AdamFamilyOptions<false>;
using AdamParamState = AdamFamilyParamState<false>;
/// torch::optim::Adam in one fused pass.
using Adam = AdamFamily<false>;

}  // namespace fastamp::optim
