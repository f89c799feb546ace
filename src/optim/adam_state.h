// SPDX-License-Identifier: Apache-2.0
#pragma once

// What Adam and AdamW do with the states of their parameters, which differ in their types only.

#include "optim/checkpoint.h"
#include "optim/kernel_check.h"
#include "optim/param_state.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>

namespace fastamp::optim {

template <typename State>
void write_adam_state(torch::serialize::OutputArchive& archive, const State& state) {
  archive.write("step", c10::IValue(read_counter(state.steps())));
  write_tensor(archive, "exp_avg", state.exp_avg());
  write_tensor(archive, "exp_avg_sq", state.exp_avg_sq());
  write_tensor(archive, "max_exp_avg_sq", state.max_exp_avg_sq());
  write_tensor(archive, "master", state.master());
}

template <typename State>
void read_adam_state(const char* function, torch::serialize::InputArchive& archive, State& state) {
  const auto count = read_entry(archive, function, "step").toInt();
  state.step(count);
  state.steps(counter_on(c10::kCPU, static_cast<double>(count)));
  state.exp_avg(read_tensor(archive, "exp_avg"));
  state.exp_avg_sq(read_tensor(archive, "exp_avg_sq"));
  state.max_exp_avg_sq(read_tensor(archive, "max_exp_avg_sq"));
  state.master(read_tensor(archive, "master"));
}

/// Brings a loaded state to its parameter's shape, device and dtypes.
template <typename State, typename Options>
void fit_adam(const char* function, State& state, const at::Tensor& param, const Options& options) {
  const auto dtype = has_kernel(param) ? options.state_dtype() : param.scalar_type();
  state.exp_avg(fitted(function, "exp_avg", state.exp_avg(), param, dtype));
  state.exp_avg_sq(fitted(function, "exp_avg_sq", state.exp_avg_sq(), param, dtype));
  state.max_exp_avg_sq(fitted(function, "max_exp_avg_sq", state.max_exp_avg_sq(), param, dtype));
  state.master(fitted(function, "master", state.master(), param, at::kFloat));
  state.steps(counter_for(param, static_cast<double>(read_counter(state.steps()))));
}

/// Whether LibTorch's Adam would have no such state.
template <typename State>
bool no_adam_state(const torch::optim::OptimizerParamState& state) {
  return !static_cast<const State&>(state).exp_avg().defined();
}

}  // namespace fastamp::optim
