// SPDX-License-Identifier: Apache-2.0
#pragma once

// States of torch's own optimizers while the fused step does their work: torch's, so that its
// step(), save() and load() understand them, with the step counter on the device.

#include "optim/states.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>

namespace fastamp::optim {

struct FusedSgdState : torch::optim::SGDParamState {
  using Plain = torch::optim::SGDParamState;
  TORCH_ARG(at::Tensor, steps);

 public:
  Plain plain() const { return static_cast<const Plain&>(*this); }
  void adopt(const Plain& state, const at::Tensor& param) {
    Plain::operator=(state);
    steps(counter_for(param, momentum_buffer().defined() ? 1 : 0));
  }

 private:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<FusedSgdState>(*this);
  }
};

/// `TorchState` is torch::optim::AdamParamState or AdamWParamState.
template <typename TorchState>
struct FusedAdamState : TorchState {
  using Plain = TorchState;
  using TorchState::serialize;
  TORCH_ARG(at::Tensor, steps);
  /// torch's counter when it was last up to date.
  TORCH_ARG(std::int64_t, agreed) = 0;

 public:
  /// Waits for the device.
  Plain plain() const {
    Plain state(static_cast<const Plain&>(*this));
    state.step(read_counter(steps()));
    return state;
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    plain().serialize(archive);
  }
  void adopt(const Plain& state, const at::Tensor& param) {
    Plain::operator=(state);
    agreed(this->step());
    steps(counter_for(param, this->step()));
  }

  /// Counts the steps that torch's own step() has made meanwhile.
  void follow_host() {
    if (this->step() != agreed()) {
      const auto seen = read_counter(steps()) + this->step() - agreed();
      steps().fill_(counter_on(c10::kCPU, seen).template item<float>());
      agreed(this->step());
    }
  }
  /// Keeps torch's counter up to date where reading the device's costs nothing.
  void inform_host() {
    if (steps().is_cpu()) {
      this->step(read_counter(steps()));
      agreed(this->step());
    }
  }

 private:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<FusedAdamState>(*this);
  }
};

/// Makes them of torch's own states when it finds such: load() puts those there.
template <typename State>
  requires requires { typename State::Plain; }
struct StateSource<State> {
  using Plain = State::Plain;

  static std::unique_ptr<State> make(const char* function, const at::Tensor& param,
                                     const torch::optim::OptimizerParamState* foreign) {
    TORCH_CHECK_TYPE(param.scalar_type() == at::kFloat, function,
                     ": expected float32 parameters, got ", param.scalar_type(), " of shape ",
                     param.sizes());
    const auto* torch_state = dynamic_cast<const Plain*>(foreign);
    TORCH_CHECK_TYPE(foreign == nullptr || torch_state != nullptr, function,
                     ": expected parameter states of torch::optim's own type, got another");
    auto state = std::make_unique<State>();
    state->adopt(torch_state != nullptr ? *torch_state : Plain(), param);
    return state;
  }
};

}  // namespace fastamp::optim
