// SPDX-License-Identifier: Apache-2.0
#include "step_adam.h"

#include "optim/adam_step.h"
#include "optim/moment_codes.h"
#include "python_step.h"

#include <torch/csrc/autograd/python_variable.h>

#include <tuple>
#include <utility>

namespace fastamp::python {
namespace {

/// From 1 on, corrections of moments are infinite, or have the wrong sign; torch raises, too.
std::pair<double, double> betas_of(PyObject* group) {
  static PyObject* const key = interned("betas");
  static constexpr auto* kExpected = "two numbers below 1";
  const auto betas = group_numbers(group, key, kExpected);
  if (betas.size() != 2 || betas[0] >= 1.0 || betas[1] >= 1.0) {
    refuse_option(key, kExpected, group_item(group, key));
  }
  return {betas[0], betas[1]};
}

class AdamSink final : public StepSink {
 public:
  AdamSink(py::handle optimizer, KeepAlive& alive)
      : StepSink(optimizer, /*takes_codes=*/true), state_(optimizer, alive), copies_(optimizer) {}

  void begin_group(PyObject* group, std::size_t size) override {
    static PyObject* const keys[] = {interned("lr"),
                                     interned("eps"),
                                     interned("weight_decay"),
                                     interned("amsgrad"),
                                     interned("decoupled_weight_decay"),
                                     interned("maximize")};
    optim::AdamGroup options;
    options.lr_tensor = group_rate_tensor(group);
    options.lr = options.lr_tensor.defined() ? 0.0 : group_number(group, keys[0]);
    std::tie(options.beta1, options.beta2) = betas_of(group);
    options.eps = group_number(group, keys[1]);
    options.weight_decay = group_number(group, keys[2]);
    options.amsgrad = group_flag(group, keys[3]);
    options.decoupled = group_flag(group, keys[4]);
    options.maximize = group_flag(group, keys[5]);
    amsgrad_ = options.amsgrad;
    stored_ = stored_of(group);
    step_.begin_group(options, size);
  }

  void add(const StepParam& param) override {
    static PyObject* const keys[] = {interned("exp_avg"), interned("exp_avg_sq"),
                                     interned("max_exp_avg_sq"), interned("step")};
    const auto moments = stored_.moments;
    if (stored_.codes && !amsgrad_ && fit_codes(param)) {
      add_codes(param);
      return;
    }
    const auto state = state_.of(param, {{{keys[0], moments},
                                          {keys[1], moments},
                                          {amsgrad_ ? keys[2] : nullptr, moments},
                                          {keys[3]},
                                          StepState::master_of(param, stored_)}});
    if (step_.add(param.param, param.grad, *state[0], *state[1], *state[2], *state[3], *state[4],
                  stored_.noisy ? param.noise_origin() : -1)) {
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

  void run(const optim::AmpStep& amp_step) {
    const py::gil_scoped_release no_gil;
    step_.run(amp_step);
    copies_.finish();
  }

 private:
  /// Decides as fastamp.optim._codes.group_of_codes: by the whole shape; a shard is one of rows.
  static bool fit_codes(const StepParam& param) {
    const auto whole = THPVariable_Unpack(param.object).sizes();
    return optim::moment_group(whole) != 0 && param.param.sizes().slice(1) == whole.slice(1);
  }

  void add_codes(const StepParam& param) {
    static PyObject* const keys[] = {interned("exp_avg_8"), interned("exp_avg_sq_8"),
                                     interned("moment_scales_8"), interned("step")};
    const auto state = state_.of(param, {{{keys[0], at::kByte},
                                          {keys[1], at::kByte},
                                          {keys[2], at::kByte},
                                          {keys[3]},
                                          StepState::master_of(param, stored_)}});
    if (step_.add(param.param, param.grad, *state[0], *state[1], at::Tensor(), *state[3], *state[4],
                  param.noise_origin(), state[2])) {
      copies_.add(param, step_);
    }
  }

  StepState state_;
  StepCopies copies_;
  optim::AdamStep step_;
  bool amsgrad_ = false;
  StoredOptions stored_;
};

}  // namespace

py::list adam_step(py::handle optimizer, py::handle amp_step) {
  return gathered_step<AdamSink>(optimizer, amp_step);
}

}  // namespace fastamp::python
