// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <vector>

namespace fastamp {

/// Options of a GraphedStep; every setter returns the object.
struct FASTAMP_API GraphedStepOptions {
  /// Whether the loss function runs in an autocast region. Without one it may make its own.
  TORCH_ARG(bool, autocast) = true;
  /// Dtype of that region, kHalf or kBFloat16; none: the device's autocast dtype (float16 on CUDA,
  /// bfloat16 on the CPU unless changed).
  TORCH_ARG(std::optional<c10::ScalarType>, dtype) = std::nullopt;
  /// Clips gradients to this norm before the step; at least 0.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  /// Clips gradient elements to this magnitude before the step; at least 0.
  TORCH_ARG(std::optional<double>, clip_value) = std::nullopt;
  /// Parts that the inputs are cut into along their first dimension; their gradients are averaged.
  TORCH_ARG(int64_t, accumulation) = 1;
  /// Passes forward and backward before the capture; at least 1. CUDA only.
  TORCH_ARG(int64_t, warmup) = 3;
};

/// A whole training step, from forward to the update of the scale, as one call.
///
/// On CUDA it is captured in a CUDA graph and replayed: no launch costs, nothing waits, the scale
/// moves and steps are skipped on the device. On the CPU the same step runs eagerly each time.
/// Construction does not train: on CUDA it runs the loss function and backward `warmup` times (so
/// buffers such as running means move), then captures. Learning rates set by schedulers or in the
/// options act at the next call. Gradients belong to the graph: leave them alone. A replay moves
/// the version counters of parameters and gradients, which caches of casts depend on; those of a
/// module's buffers, which it does not know, stay.
///
/// Not thread-safe. All that the loss function uses and the optimizer must outlive it and stay
/// where they are. The scaler may be moved: the step goes on with it where it is. Once it was
/// destroyed, or another was assigned to it, calls are refused.
///
/// It may be moved itself. Every call on the object that it was moved from throws c10::Error, until
/// another step is assigned to that.
class FASTAMP_API GraphedStep {
 public:
  /// Returns the mean loss of the inputs, a tensor of one element that requires gradients. For
  /// capture it must not wait for the device.
  using LossFunction = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

  /// @param loss       Runs the model; see LossFunction.
  /// @param optimizer  One of fastamp::optim, over parameters on the inputs' device.
  /// @param scaler     May be disabled: then gradients are neither scaled nor checked.
  /// @param sample_inputs  At least one tensor, all on one device; they give shapes and dtypes.
  /// @param options    As in GraphedStepOptions: by default a region, and no clipping.
  /// @throws c10::ValueError  no function, another optimizer, no inputs, undefined ones or inputs
  ///     of several devices, or options out of range. c10::Error if the scaler was moved from.
  GraphedStep(LossFunction loss, torch::optim::Optimizer& optimizer, GradScaler& scaler,
              const std::vector<at::Tensor>& sample_inputs, const GraphedStepOptions& options = {});
  ~GraphedStep();
  GraphedStep(GraphedStep&&) noexcept;
  GraphedStep& operator=(GraphedStep&&) noexcept;
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  /// Trains one step. Asynchronous on CUDA.
  /// @param inputs  Of the number, shapes, dtypes and device of sample_inputs.
  /// @returns the loss, detached.
  /// @throws c10::ValueError  other inputs, or a loss function that returned no such loss. No
  ///     parameter and no state was changed. c10::Error if the scaler is gone or the optimizer was
  ///     moved from, or its groups are not those of the capture.
  at::Tensor operator()(const std::vector<at::Tensor>& inputs);

  bool is_graphed() const;  ///< Whether calls replay a CUDA graph.

 private:
  struct Impl;
  Impl& whole(const char* function) const;

  std::unique_ptr<Impl> impl_;  ///< Null: moved from.
};

/// The options in one line, for people.
FASTAMP_API std::ostream& operator<<(std::ostream& out, const GraphedStepOptions& options);

}  // namespace fastamp
