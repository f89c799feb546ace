// SPDX-License-Identifier: Apache-2.0
#include "step_adam.h"

#include "optim/adam_step.h"
#include "step_gather.h"

namespace fastamp::python {
namespace {

double beta(const py::object& betas, py::ssize_t index) {
  const double number = PyFloat_AsDouble(betas[py::int_(index)].ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return number;
}

class AdamSink final : public StepSink {
 public:
  AdamSink(py::handle optimizer, KeepAlive& alive) : state_(optimizer, alive), copies_(optimizer) {}

  void begin_group(PyObject* group, std::size_t size) override {
    static PyObject* const keys[] = {interned("lr"),      interned("betas"),
                                     interned("eps"),     interned("weight_decay"),
                                     interned("amsgrad"), interned("decoupled_weight_decay"),
                                     interned("maximize")};
    optim::AdamGroup options;
    options.lr_tensor = group_rate_tensor(group);
    options.lr = options.lr_tensor.defined() ? 0.0 : group_number(group, keys[0]);
    const auto betas = group_item(group, keys[1]);
    options.beta1 = beta(betas, 0);
    options.beta2 = beta(betas, 1);
    options.eps = group_number(group, keys[2]);
    options.weight_decay = group_number(group, keys[3]);
    options.amsgrad = group_flag(group, keys[4]);
    options.decoupled = group_flag(group, keys[5]);
    options.maximize = group_flag(group, keys[6]);
    amsgrad_ = options.amsgrad;
    step_.begin_group(options, size);
  }

  void add(const StepParam& param) override {
    static PyObject* const keys[] = {interned("exp_avg"), interned("exp_avg_sq"),
                                     interned("max_exp_avg_sq"), interned("step"),
                                     interned("master_param")};
    using Kind = StepState::Kind;
    const auto state = state_.of(param, {{{keys[0], Kind::kMoment},
                                          {keys[1], Kind::kMoment},
                                          {amsgrad_ ? keys[2] : nullptr, Kind::kMoment},
                                          {keys[3], Kind::kStep},
                                          {param.is_16_bit() ? keys[4] : nullptr, Kind::kMaster}}});
    if (step_.add(param.param, param.grad, *state[0], *state[1], *state[2], *state[3], *state[4])) {
      copies_.add(param, step_);
    }
  }

  void skip(PyObject* param) override { state_.skip(param); }

  void check_sparse() const override {
    PyErr_SetString(PyExc_RuntimeError,
                    "step: expected dense gradients, got a sparse one: Adam does not support "
                    "sparse gradients, please consider SparseAdam instead");
    throw py::error_already_set();
  }

  void run(const optim::StepGate& gate) {
    const py::gil_scoped_release no_gil;
    step_.run(gate);
    copies_.finish();
  }

 private:
  StepState state_;
  StepCopies copies_;
  optim::AdamStep step_;
  bool amsgrad_ = false;
};

}  // namespace

py::list adam_step(py::handle optimizer, py::handle gate) {
  return gathered_step<AdamSink>(optimizer, gate);
}

}  // namespace fastamp::python
