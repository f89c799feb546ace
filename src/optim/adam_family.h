#pragma once

// One step of Adam or AdamW over a torch::optim::Optimizer: ours, or torch's own carried by us.
// They differ in the types of their options and states, never in arithmetic.

#include "optim/adam_step.h"
#include "optim/sgd_family.h"
#include "optim/states.h"

#include <ATen/core/grad_mode.h>

#include <tuple>

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

/// Makes the tensors that a parameter's state lacks.
template <typename State, typename Options>
void complete(State& state, const at::Tensor& param, const Options& options) {
  const auto dtype =
      state.exp_avg().defined() ? state.exp_avg().scalar_type() : state_dtype(options);
  for (auto* moment : {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()}) {
    if (!moment->defined() && (moment != &state.max_exp_avg_sq() || options.amsgrad())) {
      *moment = zeros_for(param, dtype);
    }
  }
}

template <typename Options, typename State, bool kDecoupled>
void run_adam(const char* function, torch::optim::Optimizer& optimizer, const StepGate& gate,
              at::ArrayRef<at::Tensor> rates, autocast::Shadows* shadows = nullptr) {
  const at::NoGradGuard no_grad;
  check_rates(function, rates, optimizer.param_groups().size());
  const at::Tensor none;
  std::vector<State*> followed;
  AdamStep step;
  autocast::ShadowedStep shadowed(shadows);
  std::size_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    step.begin_group(adam_group(options, kDecoupled, rate_of(rates, index++)),
                     group.params().size());
    for (const auto& param : group.params()) {
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (!grad.defined()) {
        continue;
      }
      TORCH_CHECK(!grad.is_sparse(), function, ": expected dense gradients, got a sparse one for a",
                  " parameter of shape ", param.sizes(),
                  ". Adam does not support sparse gradients");
      auto& state = state_for<State>(function, optimizer.state(), param);
      complete(state, param, options);
      const at::Tensor* master = &none;
      if constexpr (requires { state.master(); }) {
        if (is_16_bit(param)) {
          if (!state.master().defined()) {
            state.master(master_of(param));
          }
          master = &state.master();
        }
      } else {
        state.follow_host();
        followed.push_back(&state);
      }
      step.add(param, grad, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(),
               state.steps(), *master);
      add_shadow(step, shadowed, param, options);
    }
  }
  step.run(gate);
  shadowed.finish();
  if constexpr (!requires(State& state) { state.master(); }) {
    for (State* state : followed) {
      state->inform_host();
    }
  }
}

}  // namespace fastamp::optim
