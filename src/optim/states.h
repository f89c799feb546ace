// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state of a parameter is found, or made at its first step, in the map that every
// torch::optim::Optimizer has.

#include "optim/checkpoint.h"
#include "optim/param_state.h"
#include "optim/starting_masters.h"

#include <fastamp/optim/stored_state.h>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <typeinfo>
#include <utility>

namespace fastamp::optim {

/// Makes a state for a parameter that has none. Specialised for states that can be made from
/// another optimizer's; `foreign` is null where there is nothing yet.
template <typename State>
struct StateSource {
  static std::unique_ptr<State> make(const char* function, const at::Tensor& param,
                                     const torch::optim::OptimizerParamState* foreign) {
    TORCH_CHECK(foreign == nullptr, function,
                ": expected parameter states of its own type, got another; use load() to read the "
                "state of another optimizer");
    auto state = std::make_unique<State>();
    if constexpr (requires { state->steps(); }) {
      state->steps(counter_for(param));
    }
    return state;
  }
};

template <typename State>
State& state_for(const char* function, StateMap& states, const at::Tensor& param) {
  void* const key = param.unsafeGetTensorImpl();
  const auto found = states.find(key);
  if (found != states.end()) [[likely]] {
    // The types are compared, not cast dynamically: this runs once per parameter and step.
    auto& known = *found->second;
    if (typeid(known) == typeid(State)) [[likely]] {
      return static_cast<State&>(known);
    }
    found->second = StateSource<State>::make(function, param, found->second.get());
    return static_cast<State&>(*found->second);
  }
  auto state = StateSource<State>::make(function, param, nullptr);
  auto& result = *state;
  states[key] = std::move(state);
  return result;
}

/// Whether an optimizer with such states leaves parameters without a kernel to LibTorch: fastamp's
/// do; for LibTorch's own, fuse_() has made sure that there are none.
template <typename State>
constexpr bool kHasForeign = requires(State& state) { state.master(); };

/// The master of a 16-bit parameter or its remainder, made at its first step; `none` for other
/// parameters. What a checkpoint has of the other kind is converted here, not when it is loaded:
/// weights may be loaded after the optimizer.
template <typename State, typename Options>
const at::Tensor& master_in(State& state, const at::Tensor& param, const Options& options,
                            bool half, const at::Tensor& none) {
  if constexpr (requires { state.remainder(); }) {
    if (half && options.master() == MasterStorage::kRemainder) {
      if (!state.remainder().defined()) {
        state.remainder(state.master().defined() ? remainder_from_master(param, state.master())
                                                 : remainder_of(param));
        state.master({});
        forget_starting_master(param.unsafeGetTensorImpl());
      }
      return state.remainder();
    }
    if (half) {
      if (!state.master().defined()) {
        state.master(state.remainder().defined() ? master_from_remainder(param, state.remainder())
                                                 : master_of(param));
        state.remainder({});
        forget_starting_master(param.unsafeGetTensorImpl());
      }
      return state.master();
    }
  }
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): the caller holds it
  return none;
}

/// The rate that replaces the options', or an undefined tensor.
inline at::Tensor rate_of(at::ArrayRef<at::Tensor> rates, std::size_t group) {
  return rates.empty() ? at::Tensor() : rates[group];
}

inline void check_rates(const char* function, at::ArrayRef<at::Tensor> rates, std::size_t groups) {
  TORCH_CHECK_VALUE(rates.empty() || rates.size() == groups, function, ": expected ", groups,
                    " learning rates, one for each parameter group, got ", rates.size());
}

}  // namespace fastamp::optim
