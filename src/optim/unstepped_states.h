// SPDX-License-Identifier: Apache-2.0
#pragma once

// States that checkpoints have of parameters that no step has seen yet.

#include "core/dtypes.h"
#include "optim/adam_family.h"
#include "optim/checkpoint.h"
#include "optim/group_options.h"
#include "optim/param_state.h"
#include "optim/starting_masters.h"

#include <fastamp/optim/stored_state.h>

#include <torch/optim/optimizer.h>

#include <memory>

namespace fastamp::optim {

/// The states that the next step would make of starting masters, which nothing else saves.
template <typename State, typename Options>
StateMap unstepped_states(const char* function, const torch::optim::Optimizer& optimizer) {
  StateMap states;
  for (const auto& group : optimizer.param_groups()) {
    const OptionsOfGroup<Options> options(function, optimizer, group);
    for (const auto& param : group.params()) {
      void* const key = param.unsafeGetTensorImpl();
      const auto master = is_16_bit(param) ? starting_master_of(param) : at::Tensor();
      if (!master.defined() || optimizer.state().find(key) != optimizer.state().end()) {
        continue;
      }
      auto state = std::make_unique<State>();
      if constexpr (requires { state->steps(); }) {
        state->steps(counter_for(param));
      }
      if constexpr (requires { state->exp_avg(); }) {
        complete(*state, param, *options);
      }
      if ((*options).master() == MasterStorage::kRemainder) {
        state->remainder(remainder_from_master(param, master));
      } else {
        state->master(master);
      }
      states[key] = std::move(state);
    }
  }
  return states;
}

}  // namespace fastamp::optim
