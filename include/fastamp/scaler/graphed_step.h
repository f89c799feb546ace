#pragma once

#include <fastamp/export.h>
#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace fastamp {

/// Options of a GraphedStep; every setter returns the object.
struct FASTAMP_API GraphedStepOptions {
  /// Dtype of the autocast region around the loss function; none: no region.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype) = std::nullopt;
  /// Clips gradients to this norm before the step.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  /// Clips gradient elements to this magnitude before the step.
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
/// options act at the next call. Gradients belong to the graph: leave them alone.
///
/// Not thread-safe. All that the loss function uses, the optimizer and the scaler must outlive it
/// and stay where they are.
class FASTAMP_API GraphedStep {
 public:
  /// Returns the mean loss of the inputs, a scalar. For capture it must not wait for the device.
  using LossFunction = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

  /// @param optimizer  One of fastamp::optim, over parameters on the inputs' device.
  /// @param scaler     May be disabled: then gradients are neither scaled nor checked.
  /// @param sample_inputs  At least one tensor, all on one device; they give shapes and dtypes.
  /// @throws c10::ValueError  another optimizer, no inputs or inputs of several devices, or options
  ///     out of range.
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
  /// @throws c10::ValueError  other inputs. Nothing was changed.
  at::Tensor operator()(const std::vector<at::Tensor>& inputs);

  bool is_graphed() const noexcept;  ///< Whether calls replay a CUDA graph.

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fastamp
