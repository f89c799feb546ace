// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_groups.h"
#include "scaler/optimizer_record.h"
#include "scaler/scaler_core.h"

#include <fastamp/scaler/agreement.h>

#include <c10/util/FunctionRef.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace fastamp::python {

namespace py = pybind11;

/// Handle of one Python optimizer. Guarded by the GIL.
struct PythonHandle final : scaler::OptimizerHandle {
  /// A weak reference to the optimizer, or itself where its class has none.
  py::object reference;
  /// What was written last to the scaler's `_per_optimizer_states`, or is like it; null: nothing.
  py::object entry;

  bool is_gone() const override { return !optimizer(); }
  /// Null if it is gone.
  py::object optimizer() const;
};

/// Said with the key of an optimizer that is being destroyed.
using OptimizerEnd = std::function<void(std::intptr_t key)>;

/// Key of a record: the optimizer's address.
std::intptr_t key_of(py::handle optimizer);
/// The record of an optimizer; null if it has none.
scaler::RecordPointer find_record(const scaler::ScalerCore& core, py::handle optimizer);
/// Returns it; a new one if it has none.
/// @param end  Called when the optimizer is destroyed, if the record is new.
scaler::RecordPointer record_of(scaler::ScalerCore& core, py::handle optimizer,
                                const OptimizerEnd& end);

using Parameters = std::vector<py::object>;

/// Collects the gradients of an iterable of parameters, without creating a Python object per tensor
/// (torch.amp spends three quarters of unscale_ there: about 0.6 us per tensor).
/// @param foreign  Receives the parameters whose gradients only Python code can unscale (DTensor
///     and other tensor subclasses), normally none.
/// @returns Whether a parameter is a subclass.
/// @throws AssertionError for an entry that is not a tensor; ValueError for a refused fp16
///     gradient; whatever the attributes of the objects raise. Requires the GIL.
bool gather_group(const py::object& params, scaler::GradientGroups& groups, Parameters& foreign);

using VisitGradient = std::function<bool(const at::Tensor& parameter, const at::Tensor& gradient)>;

/// Visits the gradients in `optimizer.param_groups` for as long as `visit` returns true. False if
/// it did not, or if there is a parameter subclass, whose gradient is a property.
bool for_each_plain(py::handle optimizer, const VisitGradient& visit);

/// Whether two parameters in `optimizer.param_groups` have one gradient, or one is a subclass, of
/// which that is not known. For the rare case that a gradient came twice.
bool may_share_gradients(py::handle optimizer);

/// The gradients of an optimizer.
struct PythonGradients {
  scaler::Gathered gathered;
  Parameters foreign;  ///< Parameters whose gradients are tensor subclasses.
};

/// Collects the gradients of every parameter in `optimizer.param_groups`, as gather_group(). Before
/// a pass they count as foreign, too, where parameters are laid out on meshes: ranks have to agree.
/// Nothing is cached between calls: walking the lists costs less than proving that a copy of them
/// is still right would, and keeps no parameter alive.
PythonGradients gather(py::handle optimizer, scaler::Purpose purpose);

/// torch's norm of any order, of all kinds of gradients.
at::Tensor torchs_norm(const PythonGradients& gradients, double norm_type);

/// The dtype that torch's norms of these gradients have after torch.stack; none if one has no norm.
std::optional<at::ScalarType> promoted_norm_dtype(
    const std::vector<scaler::DeviceGradients>& groups);

/// One call on a Python scaler about one of its optimizers. What the core is given comes from the
/// scaler's fields. How far the optimizer has come is read from where torch keeps it, the
/// dictionary `_per_optimizer_states` of the scaler, where users and subclasses read and write it,
/// and written there after each work(). A guard has None there: its record knows. Requires the GIL.
class OptimizerCall {
 public:
  /// @param device  The scaler's kind of device.
  OptimizerCall(scaler::RecordPointer record, py::handle scaler, py::handle optimizer,
                c10::DeviceType device);

  scaler::OptimizerRecord& record() const { return *record_; }
  bool is_ready() const { return record_->progress.stage == scaler::Stage::kReady; }
  /// Returns what the core is given.
  scaler::ScalerCall data() const;

  scaler::Gathered gather(scaler::Purpose purpose) const {
    return python::gather(optimizer_, purpose).gathered;
  }
  /// Whether all gradients are others than those of the last pass, and scale() was called since:
  /// then a new backward pass has made them, and they are scaled.
  bool is_scaled_anew() const;
  /// Forgets what was put off to the step for gradients that are gone: the iteration was broken
  /// off. Only for an optimizer that is not unscaled yet.
  void forget_if_scaled_anew() const;

  /// Works on gradients with data(), which is read first, without the GIL, and writes down how far
  /// the optimizer has come, also if that throws.
  void work(c10::function_ref<void(const scaler::ScalerCall&)> function);
  /// Clips unscaled gradients as it was put off to the step.
  void apply_clips() const;
  /// Leaves no trace of the call in the scaler.
  void forget() const;

 private:
  const at::Tensor& scale() const;
  PyObject* state() const;
  void write_progress();

  scaler::RecordPointer record_;
  py::handle optimizer_;
  py::object scale_;   ///< A tensor.
  py::object states_;  ///< The dictionary, or None.
  py::int_ key_;
  std::uint64_t times_scaled_;
  c10::DeviceType device_;
  FlagAgreement agreement_;
  scaler::Progress known_;  ///< As it is in the dictionary.
};

/// Makes a flag the same on all ranks of a Python scaler; empty without a process group.
FlagAgreement agreement_of(py::handle scaler);

}  // namespace fastamp::python
