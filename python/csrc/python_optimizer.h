// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gather.h"
#include "scaler/optimizer_port.h"

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fastamp::python {

namespace py = pybind11;

/// What is kept of one Python optimizer. Guarded by the GIL.
struct PythonHandle final : scaler::OptimizerHandle {
  /// A weak reference to the optimizer, or itself where its class has none.
  py::object reference;
  py::object flag;  ///< The non-finite flag of the last pass, a Python tensor.

  bool is_gone() const override { return optimizer() == nullptr; }
  /// Borrowed; null if it is gone.
  PyObject* optimizer() const;
};

/// Said with the key of an optimizer that is being destroyed.
using OptimizerEnd = std::function<void(std::intptr_t key)>;

/// A Python optimizer for ScalerCore. Stage and flags are where torch keeps them, in the dictionary
/// `_per_optimizer_states` of the scaler, where users and subclasses of it read and write them. For
/// one call; requires the GIL.
class PythonOptimizer final : public scaler::OptimizerPort {
 public:
  /// @param states  The scaler's `_per_optimizer_states`.
  /// @param hooks   A fastamp._scaler.hooks.CoreHooks.
  /// @param end     Called when an optimizer is destroyed that had no handle before.
  PythonOptimizer(py::handle optimizer, py::dict states, py::object hooks, const OptimizerEnd& end)
      : optimizer_(optimizer),
        states_(std::move(states)),
        hooks_(std::move(hooks)),
        end_(end),
        state_key_(key()) {}

  std::intptr_t key() const override { return reinterpret_cast<std::intptr_t>(optimizer_.ptr()); }
  std::unique_ptr<scaler::OptimizerHandle> make_handle() override;
  bool owns(const scaler::OptimizerHandle& handle) const override;

  scaler::Stage stage(const scaler::OptimizerRecord& record) const override;
  std::vector<at::Tensor> flags(const scaler::OptimizerRecord& record) const override;
  void set(scaler::OptimizerRecord& record, scaler::Stage stage,
           const std::vector<at::Tensor>& flags) override;
  void set_stepped(scaler::OptimizerRecord& record) override;
  void reset(scaler::OptimizerRecord& record) override;

  scaler::Gathered gather(scaler::OptimizerRecord& record, scaler::Purpose purpose) override;
  bool all_gradients(c10::function_ref<bool(const at::Tensor&)> visit) const override;
  bool may_check() const override { return may_check_; }
  void unscale() override;
  void begin_unscale(scaler::OptimizerRecord& record) override;
  at::Tensor flag_for_pass(scaler::OptimizerRecord& record, const at::Tensor& scale) override;
  void run(c10::function_ref<void()> pass) override;
  void unscaled_by(const std::shared_ptr<scaler::PassResult>& pass) override;

  c10::ScalarType norm_dtype(const std::vector<scaler::DeviceGradients>& groups) const override;
  at::Tensor torchs_norm(const scaler::Gathered& gathered, double norm_type) override;
  void multiply_foreign(const at::Tensor& factor) override;
  void clamp(scaler::OptimizerRecord& record, double clip_value) override;
  void check_finite(const at::Tensor& norm, double norm_type) const override;

  void step(const optim::StepGate& gate) override;

  /// A user's `unscale_` must see the gradients before they are checked.
  void forbid_checks() { may_check_ = false; }
  /// What step() passes on.
  void set_step_arguments(py::tuple args, py::dict kwargs);
  py::object take_result() { return std::move(result_); }

 private:
  /// The optimizer's state in states_; null if there is none. Borrowed.
  PyObject* state() const;

  py::handle optimizer_;
  py::dict states_;
  py::object hooks_;
  const OptimizerEnd& end_;
  py::int_ state_key_;
  bool may_check_ = true;
  Parameters foreign_;
  py::tuple args_;
  py::dict kwargs_;
  py::object result_ = py::none();
};

/// The dtype that torch's norms of these gradients have after torch.stack; none if one has no norm.
std::optional<at::ScalarType> promoted_norm_dtype(
    const std::vector<scaler::DeviceGradients>& groups);

}  // namespace fastamp::python
