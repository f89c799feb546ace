// SPDX-License-Identifier: Apache-2.0
#pragma once

// One step of SGD over a torch::optim::Optimizer: fastamp's, or one of torch's that is fused. They
// differ in the types of their options and states, never in arithmetic.

#include "core/dtypes.h"
#include "kernels/functors/noise.h"
#include "optim/group_options.h"
#include "optim/kernel_check.h"
#include "optim/states.h"
#include "optim/step_lists.h"
#include "optim/torch_step.h"
#include "optim/weight_copies.h"

#include <fastamp/optim/stored_state.h>

#include <ATen/core/grad_mode.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>

namespace fastamp::optim {

/// The noise of a group's n-th parameter, counted from 1 over all groups; negative if its narrow
/// moments are rounded to nearest, or are float32.
template <typename Options>
std::int64_t origin_in(const Options& options, std::size_t n) {
  if (state_dtype(options) == at::kFloat) {
    return -1;
  }
  if constexpr (requires { options.state_rounding(); }) {
    if (options.state_dtype() == at::kBFloat16 &&
        options.state_rounding() == StateRounding::kNearest) {
      return -1;
    }
  }
  return kernels::noise_origin(n - 1);
}

template <typename Options>
SgdGroup sgd_group(const Options& options, const at::Tensor& rate) {
  SgdGroup group{.lr = options.lr(),
                 .lr_tensor = rate,
                 .momentum = options.momentum(),
                 .dampening = options.dampening(),
                 .weight_decay = options.weight_decay(),
                 .nesterov = options.nesterov()};
  if constexpr (requires { options.maximize(); }) {
    group.maximize = options.maximize();
  }
  return group;
}

/// Undefined where weights have no weight copies, as with torch's own options.
template <typename Options>
at::ScalarType autocast_dtype(const Options& options) {
  if constexpr (requires { options.autocast_dtype(); }) {
    return options.autocast_dtype();
  } else {
    return at::ScalarType::Undefined;
  }
}

/// Gives the parameter that was added last to a step its weight copy, if it has one. Not for one
/// that is listed again (a module registered under two names): it has its copy already.
template <typename Step, typename Options>
void add_copy(Step& step, autocast::CopyingStep& copying, const at::Tensor& param,
              const Options& options) {
  if (autocast_dtype(options) != at::ScalarType::Undefined) {
    if (auto weight_copy = copying.open(param, autocast_dtype(options)); weight_copy.defined()) {
      step.add_copy(param, std::move(weight_copy));
    }
  }
}

/// False if LibTorch's step makes the buffer: there is none in use, and its first is the gradient.
template <typename State, typename Options>
  requires requires(State& state) { state.momentum_buffer(); }
bool fit_for_torch(State& state, const at::Tensor& /*param*/, const Options& options) {
  return options.momentum() == 0.0 || read_counter(state.steps()) > 0;
}

template <typename State, typename Options>
  requires requires(State& state) { state.momentum_buffer(); }
void follow_torch(State& state, const at::Tensor& param, const Options& options) {
  if (options.momentum() != 0.0) {
    state.steps(counter_for(param, read_counter(state.steps()) + 1));
  }
}

/// Puts a parameter with a gradient on the step's lists. False if it was added before.
/// @param number  Of the parameter, counted from 1 over all groups.
/// @param none  Stands for tensors that the parameter does not have; lives as long as the step.
template <typename State, typename Options>
bool add_param(const char* function, torch::optim::Optimizer& optimizer, const Options& options,
               const at::Tensor& param, std::size_t number, bool half, const at::Tensor& none,
               SgdStep& step) {
  const at::Tensor& given = param.unsafeGetTensorImpl()->grad();
  const bool sparse = given.is_sparse();
  const at::Tensor grad = sparse ? given.to_dense() : given;
  if (sparse) {
    step.look_up_repeats(param);
  }
  if (options.momentum() == 0.0 && !half) {
    return step.add(param, grad, none, none, none);
  }
  auto& state = state_for<State>(function, optimizer.state(), param);
  if (options.momentum() != 0.0) {
    bring_moment(state.momentum_buffer(), param, state_dtype(options));
  }
  return step.add(param, grad, state.momentum_buffer(), state.steps(),
                  master_in(state, param, options, half, none), origin_in(options, number));
}

template <typename Options, typename State>
void run_sgd(const char* function, torch::optim::Optimizer& optimizer, const AmpStep& amp_step,
             at::ArrayRef<at::Tensor> rates, autocast::WeightCopies* weight_copies = nullptr) {
  const at::NoGradGuard no_grad;
  check_rates(function, rates, optimizer.param_groups().size());
  check_groups<Options>(function, optimizer);
  const at::Tensor none;
  ForeignParams foreign;
  KernelCheck is_native;
  SgdStep step;
  autocast::CopyingStep copying(weight_copies);
  std::size_t index = 0;
  std::size_t number = 0;  // of parameters so far
  for (const auto& group : optimizer.param_groups()) {
    const OptionsOfGroup<Options> held(function, optimizer, group);
    const Options& options = *held;
    step.begin_group(sgd_group(options, rate_of(rates, index)), group.params().size());
    for (const auto& param : group.params()) {
      if (++number; !param.unsafeGetTensorImpl()->grad().defined()) {
        continue;
      }
      if (kHasForeign<State> && !is_native(param)) {
        foreign.add(index, param);
        continue;
      }
      const bool half = kHasForeign<State> ? is_native.is_16_bit() : is_16_bit(param);
      if (add_param<State>(function, optimizer, options, param, number, half, none, step)) {
        add_copy(step, copying, param, options);
      }
    }
    ++index;
  }
  step.run(amp_step);
  copying.finish();
  if constexpr (kHasForeign<State>) {
    if (!foreign.empty()) {
      step_with_torch<torch::optim::SGD, State, Options>(function, optimizer, foreign, amp_step,
                                                         rates);
    }
  }
}

}  // namespace fastamp::optim
