// SPDX-License-Identifier: Apache-2.0
#pragma once

// What Adam and AdamW do with the states of their parameters, which differ in their types only.

#include "optim/checkpoint.h"
#include "optim/encoded_moments.h"
#include "optim/kernel_check.h"
#include "optim/param_state.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <utility>

namespace fastamp::optim {

template <typename State>
void write_adam_state(torch::serialize::OutputArchive& archive, const State& state) {
  archive.write("step", c10::IValue(read_counter(state.steps())));
  // Codes under names of their own: whoever does not know them must not take them for moments.
  const bool codes = state.moment_scales().defined();
  write_tensor(archive, codes ? "exp_avg_8" : "exp_avg", state.exp_avg());
  write_tensor(archive, codes ? "exp_avg_sq_8" : "exp_avg_sq", state.exp_avg_sq());
  write_tensor(archive, "moment_scales_8", state.moment_scales());
  write_tensor(archive, "max_exp_avg_sq", state.max_exp_avg_sq());
  write_tensor(archive, "master", state.master());
  write_tensor(archive, "master_remainder", state.remainder());
}

template <typename State>
void read_adam_state(const char* function, torch::serialize::InputArchive& archive, State& state) {
  const auto count = read_entry(archive, function, "step").toInt();
  state.step(count);
  state.steps(counter_on(c10::kCPU, count));
  state.moment_scales(read_tensor(archive, "moment_scales_8"));
  const bool codes = state.moment_scales().defined();
  state.exp_avg(read_tensor(archive, codes ? "exp_avg_8" : "exp_avg"));
  state.exp_avg_sq(read_tensor(archive, codes ? "exp_avg_sq_8" : "exp_avg_sq"));
  state.max_exp_avg_sq(read_tensor(archive, "max_exp_avg_sq"));
  state.master(read_tensor(archive, "master"));
  state.remainder(read_tensor(archive, "master_remainder"));
}

/// The dtype of the moments of a group that are no codes.
template <typename Options>
at::ScalarType moments_dtype(const Options& options) {
  return state_dtype(options) == at::kByte ? at::kBFloat16 : state_dtype(options);
}

/// Elements that share a scale in a parameter's moments; 0 if they are no codes of 8 bits.
template <typename Options>
std::int64_t group_of_codes(const at::Tensor& param, const Options& options) {
  const bool codes = options.state_dtype() == at::kByte && !options.amsgrad();
  return codes ? moment_group(param.sizes()) : 0;
}

/// Turns moments into codes, or codes into moments of that dtype, where a state has the others.
template <typename State>
void change_moments(State& state, std::int64_t group, at::ScalarType dtype) {
  const bool has_codes = state.moment_scales().defined();
  if (!state.exp_avg().defined() || has_codes == (group != 0)) {
    return;
  }
  if (has_codes) {
    auto [first, second] =
        decode_moments({state.exp_avg(), state.exp_avg_sq(), state.moment_scales()});
    first = first.to(dtype);  // Both before either takes the codes' place.
    second = second.to(dtype);
    state.exp_avg(std::move(first)).exp_avg_sq(std::move(second));
    state.moment_scales({});
    return;
  }
  auto codes = encode_moments(state.exp_avg(), state.exp_avg_sq(), group);
  state.exp_avg(codes.exp_avg).exp_avg_sq(codes.exp_avg_sq);
  state.moment_scales(codes.scales);
  state.max_exp_avg_sq({});
}

/// Brings loaded codes to their parameter's device.
template <typename State>
void fit_codes(const char* function, State& state, const at::Tensor& param, std::int64_t group) {
  const EncodedMoments codes{state.exp_avg(), state.exp_avg_sq(), state.moment_scales()};
  TORCH_CHECK_VALUE(fit_param(codes, param, group), function,
                    ": expected codes of moments of shape ", param.sizes(), " in groups of ", group,
                    ", got shapes ", codes.exp_avg.sizes(), " and ", codes.scales.sizes());
  for (auto* t : {&state.exp_avg(), &state.exp_avg_sq(), &state.moment_scales()}) {
    *t = t->to(param.device(), at::kByte).contiguous();
  }
}

/// Brings a loaded state to its parameter's shape, device and dtypes.
template <typename State, typename Options>
void fit_adam(const char* function, State& state, const at::Tensor& param, const Options& options) {
  const bool native = has_kernel(param);
  const auto dtype = native ? moments_dtype(options) : param.scalar_type();
  const auto group = native ? group_of_codes(param, options) : 0;
  if (group == 0) {
    change_moments(state, group, at::kFloat);
    state.exp_avg(fitted(function, "exp_avg", state.exp_avg(), param, dtype));
    state.exp_avg_sq(fitted(function, "exp_avg_sq", state.exp_avg_sq(), param, dtype));
    state.max_exp_avg_sq(fitted(function, "max_exp_avg_sq", state.max_exp_avg_sq(), param, dtype));
  } else if (state.exp_avg().defined()) {
    if (!state.moment_scales().defined()) {
      state.exp_avg(fitted(function, "exp_avg", state.exp_avg(), param, at::kFloat));
      state.exp_avg_sq(fitted(function, "exp_avg_sq", state.exp_avg_sq(), param, at::kFloat));
    }
    change_moments(state, group, dtype);
    fit_codes(function, state, param, group);
  }
  state.master(fitted(function, "master", state.master(), param, at::kFloat));
  state.remainder(fitted(function, "master_remainder", state.remainder(), param, at::kShort));
  state.steps(counter_for(param, read_counter(state.steps())));
}

/// Whether LibTorch's Adam would have no such state.
template <typename State>
bool no_adam_state(const torch::optim::OptimizerParamState& state) {
  return !static_cast<const State&>(state).exp_avg().defined();
}

}  // namespace fastamp::optim
