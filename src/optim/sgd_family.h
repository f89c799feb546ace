#pragma once

// One step of SGD over a torch::optim::Optimizer: ours, or torch's own carried by us. Both differ
// in the types of their options and states, never in arithmetic.

#include "autocast/shadows.h"
#include "optim/sgd_step.h"
#include "optim/states.h"

#include <ATen/core/grad_mode.h>

namespace fastamp::optim {

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

template <typename Options>
at::ScalarType state_dtype(const Options& options) {
  if constexpr (requires { options.state_dtype(); }) {
    return options.state_dtype();
  } else {
    return at::kFloat;
  }
}

/// Undefined where weights have no shadows, as with torch's own options.
template <typename Options>
at::ScalarType shadow_dtype(const Options& options) {
  if constexpr (requires { options.shadow_dtype(); }) {
    return options.shadow_dtype();
  } else {
    return at::ScalarType::Undefined;
  }
}

/// Gives the parameter that was added last to a step its shadow, if it has one.
template <typename Step, typename Options>
void add_shadow(Step& step, autocast::ShadowedStep& shadowed, const at::Tensor& param,
                const Options& options) {
  if (shadow_dtype(options) != at::ScalarType::Undefined) {
    if (auto shadow = shadowed.open(param, shadow_dtype(options)); shadow.defined()) {
      step.add_shadow(param, std::move(shadow));
    }
  }
}

template <typename Options, typename State>
void run_sgd(const char* function, torch::optim::Optimizer& optimizer, const StepGate& gate,
             at::ArrayRef<at::Tensor> rates, autocast::Shadows* shadows = nullptr) {
  const at::NoGradGuard no_grad;
  check_rates(function, rates, optimizer.param_groups().size());
  const at::Tensor none;
  SgdStep step;
  autocast::ShadowedStep shadowed(shadows);
  std::size_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    step.begin_group(sgd_group(options, rate_of(rates, index++)), group.params().size());
    for (const auto& param : group.params()) {
      const at::Tensor& given = param.unsafeGetTensorImpl()->grad();
      if (!given.defined()) {
        continue;
      }
      const at::Tensor grad = given.is_sparse() ? given.to_dense() : given;
      const bool half = is_16_bit(param);
      if (options.momentum() == 0.0 && !half) {
        step.add(param, grad, none, none, none);
        add_shadow(step, shadowed, param, options);
        continue;
      }
      auto& state = state_for<State>(function, optimizer.state(), param);
      if (options.momentum() != 0.0 && !state.momentum_buffer().defined()) {
        state.momentum_buffer(zeros_for(param, state_dtype(options)));
      }
      const at::Tensor* master = &none;
      if constexpr (requires { state.master(); }) {
        if (half) {
          if (!state.master().defined()) {
            state.master(master_of(param));
          }
          master = &state.master();
        }
      }
      step.add(param, grad, state.momentum_buffer(), state.steps(), *master);
      add_shadow(step, shadowed, param, options);
    }
  }
  step.run(gate);
  shadowed.finish();
}

}  // namespace fastamp::optim
