// SPDX-License-Identifier: Apache-2.0
#include "optim/adam_family.h"
#include "optim/fused_states.h"

#include <fastamp/optim/amp_step_optimizer.h>
#include <fastamp/optim/fuse.h>

#include <c10/util/Type.h>

#include <algorithm>
#include <memory>
#include <typeinfo>
#include <vector>

namespace fastamp::optim {
namespace {

using torch::optim::Optimizer;
using AdamState = FusedAdamState<torch::optim::AdamParamState>;
using AdamWState = FusedAdamState<torch::optim::AdamWParamState>;

/// The mark of a fused optimizer is an empty state under a key that no parameter has: it lives and
/// dies with the optimizer, which a list of addresses would not.
void* mark() {
  static char address = 0;
  return &address;
}

/// Calls visit.operator()<Options, State, kDecoupled>() for the type of optimizer. Exactly the
/// type: a derived class may have a step() of its own.
template <typename Visit>
bool visit_type(const Optimizer& optimizer, const Visit& visit) {
  if (typeid(optimizer) == typeid(torch::optim::SGD)) {
    visit.template operator()<torch::optim::SGDOptions, FusedSgdState, false>();
  } else if (typeid(optimizer) == typeid(torch::optim::Adam)) {
    visit.template operator()<torch::optim::AdamOptions, AdamState, false>();
  } else if (typeid(optimizer) == typeid(torch::optim::AdamW)) {
    visit.template operator()<torch::optim::AdamWOptions, AdamWState, true>();
  } else {
    return false;
  }
  return true;
}

bool can_fuse_param(const at::Tensor& param) {
  return param.scalar_type() == at::kFloat && param.layout() == at::kStrided &&
         (param.is_cpu() || param.is_cuda());
}

bool can_fuse_all(const Optimizer& optimizer) {
  return std::ranges::all_of(optimizer.param_groups(), [](const auto& group) {
    return std::ranges::all_of(group.params(), can_fuse_param);
  });
}

}  // namespace

bool can_fuse(const Optimizer& optimizer) {
  return visit_type(optimizer, []<typename, typename, bool> {}) && can_fuse_all(optimizer);
}

bool is_fused(const Optimizer& optimizer) {
  return optimizer.state().find(mark()) != optimizer.state().end();
}

Optimizer& fuse_(Optimizer& optimizer) {
  if (is_fused(optimizer) || dynamic_cast<AmpStepOptimizer*>(&optimizer) != nullptr) {
    return optimizer;
  }
  TORCH_CHECK_TYPE(can_fuse_all(optimizer),
                   "fuse: expected float32 parameters on cpu or cuda, got others; "
                   "fastamp::optim has optimizers that keep master weights for 16-bit ones");
  const bool known = visit_type(optimizer, [&]<typename Options, typename State, bool> {
    auto& states = optimizer.state();
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& param : group.params()) {
        if (states.find(param.unsafeGetTensorImpl()) != states.end()) {
          state_for<State>("fuse", states, param);
        }
      }
    }
    states[mark()] = std::make_unique<State>();
  });
  TORCH_CHECK_TYPE(known,
                   "fuse: expected an optimizer of exactly the type torch::optim::SGD, Adam or "
                   "AdamW, got ",
                   c10::demangle(typeid(optimizer).name()));
  return optimizer;
}

void unfuse_(Optimizer& optimizer) {
  if (!is_fused(optimizer)) {
    return;
  }
  visit_type(optimizer, [&]<typename, typename State, bool> {
    StateMap states;
    for (const auto& [key, state] : optimizer.state()) {
      if (key == mark()) {
        continue;
      }
      const auto& known = *state;
      if (typeid(known) != typeid(State)) {
        states[key] = known.clone();
        continue;
      }
      const auto& fused = static_cast<const State&>(known);
      if (read_counter(fused.steps()) > 0) {  // torch's have no state before their first step.
        states[key] = std::make_unique<typename State::Plain>(fused.plain());
      }
    }
    optimizer.state() = std::move(states);
  });
}

void fused_step(Optimizer& optimizer, const AmpStep& amp_step,
                at::ArrayRef<at::Tensor> learning_rates) {
  constexpr const char* kFunction = "fused_step";
  TORCH_CHECK_VALUE(is_fused(optimizer), kFunction,
                    ": expected an optimizer that fuse_() was called on, got another");
  visit_type(optimizer, [&]<typename Options, typename State, bool kDecoupled> {
    if constexpr (std::is_same_v<State, FusedSgdState>) {
      run_sgd<Options, State>(kFunction, optimizer, amp_step, learning_rates);
    } else {
      run_adam<Options, State, kDecoupled>(kFunction, optimizer, amp_step, learning_rates);
    }
  });
}

}  // namespace fastamp::optim
