// SPDX-License-Identifier: Apache-2.0
#pragma once

// One step of Adam or AdamW over a torch::optim::Optimizer: fastamp's, or one of torch's that is
// fused. They differ in the types of their options and states, never in arithmetic.

#include "optim/adam_state.h"
#include "optim/sgd_family.h"
#include "optim/states.h"
#include "optim/step_lists.h"

#include <ATen/core/grad_mode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <vector>

namespace fastamp::optim {

template <typename Options>
AdamGroup adam_group(const Options& options, bool decoupled, const at::Tensor& rate) {
  AdamGroup group{.lr = options.lr(),
                  .lr_tensor = rate,
                  .beta1 = std::get<0>(options.betas()),
                  .beta2 = std::get<1>(options.betas()),
                  .eps = options.eps(),
                  .weight_decay = options.weight_decay(),
                  .decoupled = decoupled,
                  .amsgrad = options.amsgrad()};
  if constexpr (requires { options.maximize(); }) {
    group.maximize = options.maximize();
  }
  return group;
}

template <typename State>
void complete_codes(State& state, const at::Tensor& param, std::int64_t group) {
  if (!state.exp_avg().defined()) {
    auto codes = zero_codes(param, group);
    state.exp_avg(codes.exp_avg).exp_avg_sq(codes.exp_avg_sq);
    state.moment_scales(codes.scales);
  }
}

/// The scales of moments that are codes, else null.
template <typename State>
const at::Tensor* scales_in(const State& state) {
  if constexpr (requires { state.moment_scales(); }) {
    return state.moment_scales().defined() ? &state.moment_scales() : nullptr;
  }
  return nullptr;
}

/// Makes the tensors that a parameter's state lacks, and converts those that are stored in another
/// way than the options say.
template <typename State, typename Options>
void complete(State& state, const at::Tensor& param, const Options& options) {
  if constexpr (requires { state.moment_scales(); }) {
    const auto group = group_of_codes(param, options);
    change_moments(state, group, moments_dtype(options));
    if (group != 0) {
      complete_codes(state, param, group);
      return;
    }
  }
  const auto dtype = moments_dtype(options);
  for (auto* moment : {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()}) {
    if (moment->defined() || moment != &state.max_exp_avg_sq() || options.amsgrad()) {
      bring_moment(*moment, param, dtype);
    }
  }
}

/// False if LibTorch's step makes the moments: then there are none, and so none to complete here.
template <typename State, typename Options>
  requires requires(State& state) { state.exp_avg(); }
bool fit_for_torch(State& state, const at::Tensor& param, const Options& options) {
  if (options.amsgrad() && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(zeros_for(param, param.scalar_type()));
  }
  return state.exp_avg().defined();
}

template <typename State, typename Options>
  requires requires(State& state) { state.exp_avg(); }
void follow_torch(State& state, const at::Tensor& param, const Options& /*options*/) {
  state.steps(counter_for(param, state.step()));
}

/// LibTorch's counters of the states that a step collects. In our states on the CPU they are
/// advanced at once, since a look at the device's counters afterwards would cost a tenth of a step
/// of small parameters; they are corrected if the step does not happen after all.
template <typename State>
class HostCounters {
 public:
  HostCounters(StateMap& states, const AmpStep& amp_step)
      : states_(states), moves_(steps_on_host(amp_step) ? 1 : 0) {}
  ~HostCounters() {
    if (!done_) {
      for (auto& entry : states_) {
        auto& known = *entry.second;
        if (typeid(known) == typeid(State)) {
          put_right(static_cast<State&>(known));
        }
      }
    }
  }
  HostCounters(const HostCounters&) = delete;
  HostCounters& operator=(const HostCounters&) = delete;

  /// Before a state is collected.
  void prepare(State& state) {
    if constexpr (requires { state.follow_host(); }) {
      state.follow_host();  // LibTorch's own step() may have run meanwhile.
      carried_.push_back(&state);
    }
  }

  /// After a state was collected: once, however often its parameter is listed.
  void move(State& state, const at::Tensor& param) {
    if constexpr (!requires { state.follow_host(); }) {
      if (param.is_cpu()) {
        state.step(state.step() + moves_);
      }
    }
  }

  /// The step has been made, or queued.
  void finish() {
    done_ = true;
    for (State* state : carried_) {
      put_right(*state);
    }
  }

 private:
  static void put_right(State& state) {
    if constexpr (requires { state.inform_host(); }) {
      state.inform_host();
    } else if (state.steps().defined() && state.steps().is_cpu()) {
      state.step(read_counter(state.steps()));
    }
  }

  StateMap& states_;
  std::int64_t moves_;
  std::vector<State*> carried_;
  bool done_ = false;
};

template <bool kDecoupled>
using TorchsAdam = std::conditional_t<kDecoupled, torch::optim::AdamW, torch::optim::Adam>;

inline void check_dense(const char* function, const at::Tensor& param, const at::Tensor& grad) {
  TORCH_CHECK(!grad.is_sparse(), function, ": expected dense gradients, got a sparse one for a",
              " parameter of shape ", param.sizes(), ". Adam does not support sparse gradients");
}

template <typename Options, typename State, bool kDecoupled>
void run_adam(const char* function, torch::optim::Optimizer& optimizer, const AmpStep& amp_step,
              at::ArrayRef<at::Tensor> rates, autocast::WeightCopies* weight_copies = nullptr) {
  const at::NoGradGuard no_grad;
  check_rates(function, rates, optimizer.param_groups().size());
  check_groups<Options>(function, optimizer);
  const at::Tensor none;
  ForeignParams foreign;
  KernelCheck is_native;
  HostCounters<State> counters(optimizer.state(), amp_step);
  AdamStep step;
  autocast::CopyingStep copying(weight_copies);
  std::size_t index = 0;
  std::size_t number = 0;  // of parameters so far
  for (const auto& group : optimizer.param_groups()) {
    const OptionsOfGroup<Options> held(function, optimizer, group);
    const Options& options = *held;
    step.begin_group(adam_group(options, kDecoupled, rate_of(rates, index)), group.params().size());
    for (const auto& param : group.params()) {
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (++number; !grad.defined()) {
        continue;
      }
      check_dense(function, param, grad);
      if (kHasForeign<State> && !is_native(param)) {
        foreign.add(index, param);
        continue;
      }
      auto& state = state_for<State>(function, optimizer.state(), param);
      complete(state, param, options);
      counters.prepare(state);
      const auto& master =
          master_in(state, param, options, kHasForeign<State> && is_native.is_16_bit(), none);
      if (step.add(param, grad, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(),
                   state.steps(), master, origin_in(options, number), scales_in(state))) {
        counters.move(state, param);
        add_copy(step, copying, param, options);
      }
    }
    ++index;
  }
  step.run(amp_step);
  copying.finish();
  counters.finish();
  if constexpr (kHasForeign<State>) {
    if (!foreign.empty()) {
      step_with_torch<TorchsAdam<kDecoupled>, State, Options>(function, optimizer, foreign,
                                                              amp_step, rates);
    }
  }
}

}  // namespace fastamp::optim
