// SPDX-License-Identifier: Apache-2.0
#include "step_sgd.h"

#include "optim/sgd_step.h"
#include "python_step.h"

namespace fastamp::python {
namespace {

class SgdSink final : public StepSink {
 public:
  SgdSink(py::handle optimizer, KeepAlive& alive)
      : StepSink(optimizer), state_(optimizer, alive), copies_(optimizer) {}

  void begin_group(PyObject* group, std::size_t size) override {
    static PyObject* const keys[] = {interned("lr"),        interned("momentum"),
                                     interned("dampening"), interned("weight_decay"),
                                     interned("nesterov"),  interned("maximize")};
    optim::SgdGroup options;
    options.lr_tensor = group_rate_tensor(group);
    options.lr = options.lr_tensor.defined() ? 0.0 : group_number(group, keys[0]);
    options.momentum = group_number(group, keys[1]);
    options.dampening = group_number(group, keys[2]);
    options.weight_decay = group_number(group, keys[3]);
    options.nesterov = group_flag(group, keys[4]);
    options.maximize = group_flag(group, keys[5]);
    moves_ = options.momentum != 0.0;
    stored_ = stored_of(group);
    step_.begin_group(options, size);
  }

  void add(const StepParam& param) override {
    static PyObject* const keys[] = {interned("momentum_buffer"), interned("momentum_steps")};
    static const at::Tensor none;
    if (!moves_ && !param.is_16_bit()) {
      if (step_.add(param.param, param.grad, none, none, none)) {
        copies_.add(param, step_);
      }
      return;
    }
    const auto state = state_.of(param, {{{moves_ ? keys[0] : nullptr, stored_.moments},
                                          {moves_ ? keys[1] : nullptr},
                                          StepState::master_of(param, stored_)}});
    const bool noisy = moves_ && stored_.noisy;
    if (step_.add(param.param, param.grad, *state[0], *state[1], *state[2],
                  noisy ? param.noise_origin() : -1)) {
      copies_.add(param, step_);
    }
  }

  void skip(PyObject* param) override { state_.skip(param); }
  void check_sparse() const override {}  // torch's own step takes them.

  void run(const optim::AmpStep& amp_step) {
    const py::gil_scoped_release no_gil;
    step_.run(amp_step);
    copies_.finish();
  }

 private:
  StepState state_;
  StepCopies copies_;
  optim::SgdStep step_;
  bool moves_ = false;
  StoredOptions stored_;
};

}  // namespace

py::list sgd_step(py::handle optimizer, py::handle amp_step) {
  return gathered_step<SgdSink>(optimizer, amp_step);
}

}  // namespace fastamp::python
