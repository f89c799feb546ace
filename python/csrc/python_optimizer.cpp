// SPDX-License-Identifier: Apache-2.0
#include "python_optimizer.h"

#include "core/tensor_kind.h"
#include "optimizer_objects.h"
#include "recent_passes.h"
#include "scaler/scale_ops.h"
#include "step_gate.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace fastamp::python {
namespace {

using scaler::OptimizerHandle;
using scaler::OptimizerRecord;
using scaler::Stage;

PythonHandle& handle_of(const OptimizerRecord& record) {
  return static_cast<PythonHandle&>(*record.handle);
}

/// A member of torch's OptState; torch keeps it for good.
PyObject* opt_state(Stage stage) {
  // No initializers: Python code runs meanwhile, and another thread that came here with the GIL
  // would wait for a guard that is never released.
  static std::array<PyObject*, 3> known{};
  static constexpr std::array kNames{"READY", "UNSCALED", "STEPPED"};
  const auto index = static_cast<std::size_t>(stage);
  if (known.at(index) == nullptr) {
    const auto states = py::module_::import("torch.amp.grad_scaler").attr("OptState");
    known.at(index) = states.attr(kNames.at(index)).ptr();
  }
  return known.at(index);
}

PyObject* stage_key() {
  static PyObject* const key = interned("stage");
  return key;
}

PyObject* flags_key() {
  static PyObject* const key = interned("found_inf_per_device");
  return key;
}

PyObject* gate_key() {
  static PyObject* const key = interned("_fastamp_gate");
  return key;
}

/// Borrowed; null if it is not there.
PyObject* item(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return found;
}

void set_item(PyObject* dict, PyObject* key, PyObject* value) {
  if (PyDict_SetItem(dict, key, value) != 0) {
    throw py::error_already_set();
  }
}

/// The flag of an earlier pass if it is in ordinary host memory and nobody else holds it or its
/// memory; else a new scalar. Creating and destroying a Python tensor takes a sixth of the time of
/// a short pass.
at::Tensor reused_flag(const py::object& earlier, const at::Tensor& scale) {
  if (earlier.ptr() != nullptr && Py_REFCNT(earlier.ptr()) == 1) {
    const auto& flag = THPVariable_Unpack(earlier.ptr());
    if (flag.use_count() == 1 && flag.storage().use_count() == 1 &&
        flag.is_inference() == c10::InferenceMode::is_enabled() &&
        scaler::is_plain_cpu_scalar(flag, at::kFloat) && scale.device().is_cpu()) {
      return flag;
    }
  }
  return scaler::flag_without_value(scale);
}

/// Gives the gate to an optimizer for one step, and takes it back if the step has not.
class GateForOneStep {
 public:
  GateForOneStep(py::handle optimizer, const optim::StepGate& gate) : optimizer_(optimizer) {
    py::setattr(optimizer, gate_key(), py::cast(std::make_shared<PythonGate>(gate)));
  }
  ~GateForOneStep() {
    // Whatever the step has raised goes on.
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject* attributes = PyObject_GetAttrString(optimizer_.ptr(), "__dict__");
    if (attributes == nullptr || PyDict_DelItem(attributes, gate_key()) != 0) {
      PyErr_Clear();
    }
    Py_XDECREF(attributes);
    PyErr_Restore(type, value, traceback);
  }
  GateForOneStep(const GateForOneStep&) = delete;
  GateForOneStep& operator=(const GateForOneStep&) = delete;

 private:
  py::handle optimizer_;
};

}  // namespace

PyObject* PythonHandle::optimizer() const {
  if (PyWeakref_Check(reference.ptr()) == 0) {
    return reference.ptr();
  }
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference.ptr(), &found);
  Py_XDECREF(found);  // The caller holds it, or only compares.
  return found;
#else
  PyObject* found = PyWeakref_GetObject(reference.ptr());
  return found == Py_None ? nullptr : found;
#endif
}

std::unique_ptr<OptimizerHandle> PythonOptimizer::make_handle() {
  auto handle = std::make_unique<PythonHandle>();
  const py::cpp_function callback(
      [end = end_, key = key()](const py::handle& /*reference*/) { end(key); });
  PyObject* reference = PyWeakref_NewRef(optimizer_.ptr(), callback.ptr());
  if (reference != nullptr) {
    handle->reference = py::reinterpret_steal<py::object>(reference);
  } else {  // A class with __slots__ and no __weakref__.
    PyErr_Clear();
    handle->reference = py::reinterpret_borrow<py::object>(optimizer_);
  }
  return handle;
}

bool PythonOptimizer::owns(const OptimizerHandle& handle) const {
  return static_cast<const PythonHandle&>(handle).optimizer() == optimizer_.ptr();
}

PyObject* PythonOptimizer::state() const { return item(states_.ptr(), state_key_.ptr()); }

Stage PythonOptimizer::stage(const OptimizerRecord& /*record*/) const {
  PyObject* const own = state();
  PyObject* const stage = own == nullptr ? nullptr : item(own, stage_key());
  if (stage == opt_state(Stage::kStepped)) {
    return Stage::kStepped;
  }
  return stage == opt_state(Stage::kUnscaled) ? Stage::kUnscaled : Stage::kReady;
}

std::vector<at::Tensor> PythonOptimizer::flags(const OptimizerRecord& /*record*/) const {
  std::vector<at::Tensor> flags;
  PyObject* const own = state();
  PyObject* const by_device = own == nullptr ? nullptr : item(own, flags_key());
  if (by_device != nullptr) {
    for (const auto& [device, flag] : py::reinterpret_borrow<py::dict>(by_device)) {
      flags.push_back(py::cast<at::Tensor>(flag));
    }
  }
  return flags;
}

void PythonOptimizer::set(OptimizerRecord& record, Stage stage,
                          const std::vector<at::Tensor>& flags) {
  py::dict by_device;
  for (const auto& flag : flags) {
    by_device[py::cast(flag.device())] = py::cast(flag);
  }
  if (flags.size() == 1) {
    handle_of(record).flag = py::cast(flags.front());
  }
  auto own = py::reinterpret_borrow<py::object>(state());
  if (own.ptr() == nullptr) {
    own = py::dict();
    set_item(states_.ptr(), state_key_.ptr(), own.ptr());
  }
  set_item(own.ptr(), stage_key(), opt_state(stage));
  set_item(own.ptr(), flags_key(), by_device.ptr());
}

void PythonOptimizer::set_stepped(OptimizerRecord& /*record*/) {
  if (PyObject* const own = state()) {
    set_item(own, stage_key(), opt_state(Stage::kStepped));
  }
}

void PythonOptimizer::reset(OptimizerRecord& /*record*/) {
  if (state() != nullptr && PyDict_DelItem(states_.ptr(), state_key_.ptr()) != 0) {
    throw py::error_already_set();
  }
}

scaler::Gathered PythonOptimizer::gather(OptimizerRecord& record, scaler::Purpose purpose) {
  using scaler::Purpose;
  const bool pass_next = purpose == Purpose::kUnscale || purpose == Purpose::kCheck;
  scaler::GradientGroups groups(/*allow_fp16=*/purpose != Purpose::kUnscale,
                                pass_next ? scaler::Use::kPassNext : scaler::Use::kTensors);
  if (purpose == Purpose::kNorm) {
    groups.coalesce_sparse();
  }
  foreign_ = gather_gradients(optimizer_, groups);
  record.shares_gradients = false;
  if (groups.any_repeats()) {
    groups.give_up_addresses();  // Python code may be called next.
    record.shares_gradients = may_share_gradients(optimizer_);
  }
  return {.groups = groups.release(), .has_foreign = !foreign_.empty()};
}

// False too if it cannot be told: of subclasses, whose gradient is a property, and of sparse ones,
// which clipping replaces by their sums.
bool PythonOptimizer::all_gradients(c10::function_ref<bool(const at::Tensor&)> visit) const {
  bool any = false;
  const bool all =
      for_each_plain(optimizer_, [&](const at::Tensor& /*parameter*/, const at::Tensor& gradient) {
        any = true;
        return !gradient.is_sparse() && visit(gradient);
      });
  return any && all;
}

void PythonOptimizer::unscale() { hooks_.attr("unscale")(optimizer_); }

void PythonOptimizer::begin_unscale(OptimizerRecord& record) {
  // The gradients of an earlier pass may run Python code as they go: before any are collected.
  const auto earlier = std::exchange(record.pass, nullptr);
}

at::Tensor PythonOptimizer::flag_for_pass(OptimizerRecord& record, const at::Tensor& scale) {
  return reused_flag(handle_of(record).flag, scale);
}

void PythonOptimizer::run(c10::function_ref<void()> pass) {
  const py::gil_scoped_release no_gil;
  pass();
}

void PythonOptimizer::unscaled_by(const std::shared_ptr<scaler::PassResult>& pass) {
  RecentPasses::get().remember(pass);
}

c10::ScalarType PythonOptimizer::norm_dtype(
    const std::vector<scaler::DeviceGradients>& groups) const {
  return promoted_norm_dtype(groups).value_or(at::kFloat);
}

at::Tensor PythonOptimizer::torchs_norm(const scaler::Gathered& gathered, double norm_type) {
  py::list gradients;
  for (const auto& group : gathered.groups) {
    for (const auto& gradient : group.gradients) {
      gradients.append(py::cast(gradient));
    }
  }
  return hooks_.attr("norm")(gradients, foreign_, norm_type).cast<at::Tensor>();
}

void PythonOptimizer::multiply_foreign(const at::Tensor& factor) {
  hooks_.attr("multiply")(foreign_, factor);
}

void PythonOptimizer::clamp(OptimizerRecord& /*record*/, double clip_value) {
  hooks_.attr("clamp")(optimizer_, clip_value);
}

void PythonOptimizer::check_finite(const at::Tensor& norm, double norm_type) const {
  hooks_.attr("check_finite")(norm, norm_type);
}

void PythonOptimizer::set_step_arguments(py::tuple args, py::dict kwargs) {
  args_ = std::move(args);
  kwargs_ = std::move(kwargs);
}

void PythonOptimizer::step(const optim::StepGate& gate) {
  static PyObject* const name = interned("step");
  const GateForOneStep scope(optimizer_, gate);
  result_ = optimizer_.attr(py::handle(name))(*args_, **kwargs_);
}

std::optional<at::ScalarType> promoted_norm_dtype(
    const std::vector<scaler::DeviceGradients>& groups) {
  std::optional<at::ScalarType> dtype;
  for (const auto& group : groups) {
    for (const auto& gradient : group.gradients) {
      const auto own = gradient.scalar_type();
      if (!at::isFloatingType(own) || !has_geometry(gradient)) {
        return std::nullopt;
      }
      dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
    }
  }
  return dtype;
}

}  // namespace fastamp::python
