// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/optim/amp_step_optimizer.h>
#include <fastamp/optim/stored_state.h>
#include <fastamp/optim/torch_arg.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>  // wide include: our options derive from its

#include <memory>
#include <vector>

namespace fastamp::autocast {
class WeightCopies;
}  // namespace fastamp::autocast

namespace fastamp::optim {

/// Options of a parameter group of SGD; every setter returns the object.
///
/// LibTorch's options, with their names and defaults, and four more. Code written for
/// torch::optim::SGDOptions takes them, `static_cast<torch::optim::SGDOptions&>(group.options())`
/// included. An optimizer also takes torch::optim::SGDOptions: the four are then those of its
/// defaults.
struct FASTAMP_API SGDOptions : torch::optim::SGDOptions {
  using Torch = torch::optim::SGDOptions;

  SGDOptions(double lr) : Torch(lr) {}  // NOLINT(*-explicit-constructor): as LibTorch's
  SGDOptions(const Torch& options)      // NOLINT(*-explicit-constructor): a ported program
      : Torch(options) {}

  // NOLINTBEGIN(bugprone-derived-method-shadowing-base-method): the setters return this class
  FASTAMP_TORCH_ARG(double, lr)
  FASTAMP_TORCH_ARG(double, momentum)
  FASTAMP_TORCH_ARG(double, dampening)
  FASTAMP_TORCH_ARG(double, weight_decay)
  FASTAMP_TORCH_ARG(bool, nesterov)
  // NOLINTEND(bugprone-derived-method-shadowing-base-method)
  /// Goes up the gradient instead of down.
  TORCH_ARG(bool, maximize) = false;
  /// Dtype of the momentum buffers: kFloat or kBFloat16.
  TORCH_ARG(c10::ScalarType, state_dtype) = c10::kFloat;
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
  friend bool operator==(const SGDOptions& left, const SGDOptions& right) {
    return static_cast<const Torch&>(left) == static_cast<const Torch&>(right) &&
           left.maximize_ == right.maximize_ && left.state_dtype_ == right.state_dtype_ &&
           left.master_ == right.master_ && left.autocast_dtype_ == right.autocast_dtype_;
  }
};

/// State of a parameter: LibTorch's and three more tensors; those that it does not need are
/// undefined. momentum_buffer() is of the parameter's shape and of state_dtype; at 0 steps its
/// contents mean nothing.
struct FASTAMP_API SGDParamState : torch::optim::SGDParamState {
  using Torch = torch::optim::SGDParamState;
  /// float32, one element, on the parameter's device: steps that momentum_buffer has seen.
  TORCH_ARG(at::Tensor, steps);
  /// float32: the weights that a 16-bit parameter is rounded from, with MasterStorage::kFloat.
  TORCH_ARG(at::Tensor, master);
  /// int16: what the parameter lacks of them, with MasterStorage::kRemainder.
  TORCH_ARG(at::Tensor, remainder);

 public:
  // NOLINTNEXTLINE(misc-override-with-different-visibility): LibTorch calls it through its base
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Reads the step counter: waits for the device.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch::optim::SGD in one fused pass over all groups (fastamp::ops::fused_sgd_).
///
/// A torch::optim::Optimizer: groups, closures, zero_grad and LibTorch's LR schedulers work as with
/// torch's. Checkpoints go both ways: load() reads what torch::optim::SGD saved, and vice versa.
/// With an AmpStep (set_amp_step) unscaling, clipping and the skip after an overflow are part of
/// the pass; they are decided on the device, and nothing waits for it.
///
/// Parameters and gradients are float32, float16 or bfloat16, mixed as they come; a 16-bit
/// parameter has float32 master weights in its state. Elements of such a parameter that are no
/// longer their master rounded have been written since the last step, and replace the master's.
/// A sparse gradient is stepped as a dense one. Parameters without a kernel (float64, complex,
/// devices other than cpu and cuda) are stepped by LibTorch's own code in the same call, with
/// the same AmpStep, whose flag the host then reads.
///
/// With autocast_dtype the step also writes the lower-precision casts of float32 parameters that
/// autocast regions have used (kept_casts() counts them), so that the next region casts no weight;
/// KeepCastsGuard says when a kept cast is used. They are no part of checkpoints.
/// @warning A parameter that is written without moving its version counter (through `.data()`) is
///     used with its OLD value until the next step that is not skipped, or drop_kept_casts().
///
/// Source: torch::optim::SGD (2.11); the arithmetic is that of torch.optim.SGD, see docs/optim.md.
// NOLINTNEXTLINE(misc-multiple-inheritance): AmpStepOptimizer is a mixin over LibTorch's class
class FASTAMP_API SGD : public torch::optim::Optimizer, public AmpStepOptimizer {
 public:
  /// @throws c10::Error if lr, momentum or weight_decay is negative, nesterov is set without a
  ///     momentum or with dampening, state_dtype is neither kFloat nor kBFloat16, or a parameter is
  ///     undefined.
  /// @throws c10::TypeError if a group has options of another optimizer.
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
               const SGDOptions& defaults);
  explicit SGD(std::vector<at::Tensor> params, const SGDOptions& defaults);

  /// Adds a group with the options that LibTorch's SGD would give it: for fields that are as in a
  /// new SGDOptions, some versions of LibTorch take the optimizer's defaults.
  /// LibTorch's own function, which this hides, is not virtual: called on the base class it does
  /// what it does for torch::optim::SGD, and in LibTorch 2.15 fields that only SGDOptions has come
  /// from the defaults.
  /// @throws c10::TypeError if the group has options of another optimizer.
  /// @throws c10::ValueError if a parameter is undefined. Nothing was changed.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): see the warning
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// @returns what the closure returned; undefined without one.
  /// @throws c10::TypeError, c10::ValueError for what ops::fused_sgd_ refuses. No parameter was
  ///     changed.
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Replaces the state of all parameters and the options of all groups, but for state_dtype and
  /// master of groups where these are not as in new options. State tensors go to the device of
  /// their parameter and to state_dtype.
  /// @throws c10::Error if the archive is not that of an SGD over as many groups and parameters of
  ///     the same shapes. Nothing was changed.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<autocast::WeightCopies> copies_;
};

}  // namespace fastamp::optim
