// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/optimizer_port.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/optim/optimizer.h>

#include <optional>
#include <vector>

namespace fastamp::scaler {

class ScalerCore;
struct ScalerCall;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// What is kept of one of LibTorch's optimizers. It is known again by its parameters: LibTorch
/// tells nobody when an optimizer is destroyed, and another one may come to live at its address.
struct LibTorchHandle final : OptimizerHandle {
  const torch::optim::Optimizer* optimizer = nullptr;  ///< Where it was; not to be read.
  std::vector<WeakTensor> parameters;
  Stage stage = Stage::kReady;
  std::vector<at::Tensor> flags;

  /// Whether all parameters are gone, and with them the optimizer.
  bool is_gone() const override;
  void start_iteration() override;
};

LibTorchHandle& handle_of(const OptimizerRecord& record);

/// A LibTorch optimizer for ScalerCore.
class LibTorchOptimizer final : public OptimizerPort {
 public:
  /// Without a core only gather(), clamp() and what concerns norms may be called.
  explicit LibTorchOptimizer(torch::optim::Optimizer& optimizer, ScalerCore* core = nullptr,
                             const ScalerCall* call = nullptr)
      : optimizer_(optimizer), core_(core), call_(call) {}

  std::intptr_t key() const override;
  std::unique_ptr<OptimizerHandle> make_handle() override;
  bool owns(const OptimizerHandle& handle) const override;

  Stage stage(const OptimizerRecord& record) const override;
  std::vector<at::Tensor> flags(const OptimizerRecord& record) const override;
  void set(OptimizerRecord& record, Stage stage, const std::vector<at::Tensor>& flags) override;
  void set_stepped(OptimizerRecord& record) override;
  void reset(OptimizerRecord& record) override;

  Gathered gather(OptimizerRecord& record, Purpose purpose) override;
  bool all_gradients(c10::function_ref<bool(const at::Tensor&)> visit) const override;
  bool may_check() const override { return !has_sparse(); }
  void unscale() override;
  at::Tensor flag_for_pass(OptimizerRecord& record, const at::Tensor& scale) override;
  void run(c10::function_ref<void()> pass) override { pass(); }

  c10::ScalarType norm_dtype(const std::vector<DeviceGradients>& groups) const override;
  at::Tensor torchs_norm(const Gathered& gathered, double norm_type) override;
  void clamp(OptimizerRecord& record, double clip_value) override;
  void check_finite(const at::Tensor& norm, double norm_type) const override;

  void step(const optim::StepGate& gate) override;

  /// Whether a step can go through a gate; fuses the optimizer first if that is asked for.
  bool takes_gate(bool fuse);
  /// Whether a gradient is sparse: it is stepped as a dense copy, and so not clipped by the step.
  bool has_sparse() const;
  /// What the step returned.
  std::optional<at::Tensor> take_result() { return std::move(result_); }

 private:
  bool shares_gradients() const;

  torch::optim::Optimizer& optimizer_;
  ScalerCore* core_;
  const ScalerCall* call_;
  std::optional<at::Tensor> result_;
};

}  // namespace fastamp::scaler
