// SPDX-License-Identifier: Apache-2.0
#include "step_muon.h"

#include "optim/muon_step.h"
#include "python_step.h"

#include <c10/core/SafePyObject.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fastamp::python {
namespace {

/// The shards of a DTensor. torch puts them together.
class DTensorShards final : public optim::MuonShards {
 public:
  explicit DTensorShards(PyObject* param) : param_(Py_NewRef(param), getPyInterpreter()) {}

  at::Tensor whole(const at::Tensor& shard) override { return call("gathered", shard); }
  at::Tensor shard(const at::Tensor& whole) override { return call("local_part", whole); }

 private:
  at::Tensor call(const char* function, const at::Tensor& tensor) const {
    const py::gil_scoped_acquire gil;
    const auto shards = py::module_::import("fastamp.optim._shards");
    const auto param = py::reinterpret_borrow<py::object>(param_.ptr(getPyInterpreter()));
    return shards.attr(function)(param, tensor).cast<at::Tensor>();
  }

  c10::SafePyObject param_;  // Let go of where nobody holds the interpreter's lock.
};

std::int64_t steps_of_iteration(PyObject* group, PyObject* key) {
  const auto item = group_item(group, key);
  const auto steps = PyLong_AsLongLong(item.ptr());
  if (steps == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_option(key, "an int", item);
  }
  if (steps >= 100) {
    throw py::value_error("step: expected ns_steps below 100, got " + std::to_string(steps) +
                          ": Number of steps must be less than 100 for computational efficiency");
  }
  return steps;
}

optim::NewtonSchulz iteration_of(py::handle optimizer, PyObject* group) {
  static PyObject* const keys[] = {interned("ns_coefficients"), interned("eps"),
                                   interned("ns_steps"), interned("ns_dtype")};
  const auto numbers = group_numbers(group, keys[0], "three numbers");
  if (numbers.size() != 3) {
    throw py::value_error("step: expected three ns_coefficients, got " +
                          std::to_string(numbers.size()) +
                          ": Coefficients must be a tuple of exactly 3 values");
  }
  optim::NewtonSchulz iteration{numbers[0], numbers[1], numbers[2], group_number(group, keys[1]),
                                steps_of_iteration(group, keys[2])};
  const auto dtype = optional_item(group, keys[3]);
  if (THPDtype_Check(dtype.ptr())) {
    iteration.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  } else if (!dtype.is_none()) {
    refuse_stored(optimizer, group);
  }
  if (iteration.dtype != at::kFloat && !is_16_bit(iteration.dtype)) {
    refuse_stored(optimizer, group);
  }
  return iteration;
}

optim::MuonRate rate_of(py::handle optimizer, PyObject* group) {
  static PyObject* const key = interned("adjust_lr_fn");
  const auto function = group_item(group, key);
  if (function.is_none() || is_word(function, "original")) {
    return optim::MuonRate::kOriginal;
  }
  if (is_word(function, "match_rms_adamw")) {
    return optim::MuonRate::kMatchRmsAdamW;
  }
  if (!is_word(function, "spectral_unclamped")) {
    refuse_stored(optimizer, group);
  }
  check_stored(optimizer, group);  // Not every torch knows it, and float64 is stepped by torch.
  return optim::MuonRate::kSpectralUnclamped;
}

class MuonSink final : public StepSink {
 public:
  MuonSink(py::handle optimizer, KeepAlive& alive)
      : StepSink(optimizer), state_(optimizer, alive), copies_(optimizer) {}

  void check_group(PyObject* group) const override {
    StepSink::check_group(group);
    iteration_of(optimizer(), group);
    rate_of(optimizer(), group);
  }

  void begin_group(PyObject* group, std::size_t /*size*/) override {
    static PyObject* const keys[] = {interned("lr"), interned("momentum"), interned("weight_decay"),
                                     interned("nesterov")};
    optim::MuonGroup options;
    options.lr_tensor = group_rate_tensor(group);
    options.lr = options.lr_tensor.defined() ? 0.0 : group_number(group, keys[0]);
    options.momentum = group_number(group, keys[1]);
    options.weight_decay = group_number(group, keys[2]);
    options.nesterov = group_flag(group, keys[3]);
    options.rate = rate_of(optimizer(), group);
    options.iteration = iteration_of(optimizer(), group);
    stored_ = stored_of(group);
    step_.begin_group(options);
  }

  void add(const StepParam& param) override {
    static PyObject* const keys[] = {interned("momentum_buffer"), interned("momentum_steps")};
    const auto state = state_.of(param, {{{keys[0], stored_.moments},
                                          StepState::master_of(param, stored_),
                                          {stored_.noisy ? keys[1] : nullptr}}});
    const auto origin = stored_.noisy ? param.noise_origin() : -1;
    bool added = false;
    if (THPVariable_CheckExact(param.object)) [[likely]] {
      added = step_.add(param.param, param.grad, *state[0], *state[1], origin, *state[2]);
    } else {
      const auto shape = py::handle(param.object).attr("shape").cast<std::vector<std::int64_t>>();
      added = step_.add(param.param, param.grad, *state[0], *state[1], origin, *state[2],
                        std::make_shared<DTensorShards>(param.object), shape);
    }
    if (added) {
      copies_.add(param, step_);
    }
  }

  bool is_differentiable(PyObject* /*group*/) const override { return false; }  // No such option.
  void skip(PyObject* param) override { state_.skip(param); }

  void check_sparse() const override {
    PyErr_SetString(PyExc_RuntimeError,
                    "step: expected dense gradients, got a sparse one: Muon does not support "
                    "sparse gradients");
    throw py::error_already_set();
  }

  void check_foreign(const at::Tensor& param) const override {
    if (param.is_complex()) {
      PyErr_SetString(PyExc_RuntimeError,
                      "step: expected real parameters, got a complex one: Muon does not support "
                      "complex parameters");
      throw py::error_already_set();
    }
  }

  void run(const optim::AmpStep& amp_step) {
    const py::gil_scoped_release no_gil;
    step_.run(amp_step);
    copies_.finish();
  }

 private:
  StepState state_;
  StepCopies copies_;
  optim::MuonStep step_;
  StoredOptions stored_;
};

}  // namespace

py::list muon_step(py::handle optimizer, py::handle amp_step) {
  return gathered_step<MuonSink>(optimizer, amp_step);
}

}  // namespace fastamp::python
