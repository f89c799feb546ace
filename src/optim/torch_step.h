// SPDX-License-Identifier: Apache-2.0
#pragma once

// LibTorch's own step for the parameters that the fused step has no kernel for, with the same
// AmpStep, as fastamp.optim does in Python.

#include "optim/checkpoint.h"
#include "optim/group_options.h"

#include <fastamp/autocast/weights_changed.h>
#include <fastamp/optim/amp_step.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fastamp::optim {

/// Parameters with gradients that are left to LibTorch, in their groups.
class ForeignParams {
 public:
  /// A parameter that was added before is stepped once.
  void add(std::size_t group, const at::Tensor& param) {
    if (known_.insert(param.unsafeGetTensorImpl()).second) {
      if (groups_.empty() || groups_.back().index != group) {
        groups_.push_back({group, {}});
      }
      groups_.back().params.push_back(param);
      all_.push_back(param);
    }
  }
  bool empty() const { return all_.empty(); }

  struct Group {
    std::size_t index;
    std::vector<at::Tensor> params;
  };
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<at::Tensor>& all() const { return all_; }

 private:
  std::vector<Group> groups_;
  std::vector<at::Tensor> all_;
  std::unordered_set<const c10::TensorImpl*> known_;
};

/// Gives LibTorch's step gradients in the form it takes: unscaled, clipped, dense, and negated to
/// maximize. The parameters' own are written by finish(), so that a step that fails leaves them
/// scaled as they were; the destructor gives them back.
class GradientsForTorch {
 public:
  explicit GradientsForTorch(const AmpStep& amp_step) : amp_step_(amp_step) {}
  ~GradientsForTorch();
  GradientsForTorch(const GradientsForTorch&) = delete;
  GradientsForTorch& operator=(const GradientsForTorch&) = delete;

  void prepare(const std::vector<at::Tensor>& params, bool maximize);
  /// Unscales and clips the parameters' own gradients, if the AmpStep says so.
  void finish() const;

 private:
  struct Lent {
    at::Tensor param;
    at::Tensor gradient;
    at::Tensor written;  ///< What is to become of it; undefined: nothing.
  };

  const AmpStep& amp_step_;
  std::vector<Lent> lent_;
};

/// @throws c10::TypeError while a CUDA graph is captured: LibTorch's step waits for the device.
void check_not_captured(const char* function, const std::vector<at::Tensor>& params);

/// Whether the step is to be skipped. Reading that waits for the device.
bool is_skipped(const AmpStep& amp_step);

/// Moves the states of parameters to another optimizer's; LibTorch's become fastamp's.
template <typename State>
void move_states(StateMap& from, StateMap& to, const std::vector<at::Tensor>& params) {
  using Torch = State::Torch;
  for (const auto& param : params) {
    const auto found = from.find(param.unsafeGetTensorImpl());
    if (found == from.end()) {
      continue;
    }
    auto state = std::move(found->second);
    from.erase(found);
    const auto& known = *state;
    if (typeid(known) != typeid(State)) {
      auto own = std::make_unique<State>();
      static_cast<Torch&>(*own) = dynamic_cast<const Torch&>(known);
      state = std::move(own);
    }
    to[param.unsafeGetTensorImpl()] = std::move(state);
  }
}

/// The groups that LibTorch's optimizer is to step, their gradients and states as it takes them.
template <typename State, typename Options>
std::vector<torch::optim::OptimizerParamGroup> groups_for_torch(const char* function,
                                                                torch::optim::Optimizer& optimizer,
                                                                const ForeignParams& foreign,
                                                                at::ArrayRef<at::Tensor> rates,
                                                                GradientsForTorch& gradients) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& [index, params] : foreign.groups()) {
    const OptionsOfGroup<Options> options(function, optimizer, optimizer.param_groups()[index]);
    gradients.prepare(params, (*options).maximize());
    auto torchs = std::make_unique<typename Options::Torch>(*options);
    if (!rates.empty()) {
      torchs->lr(rates[index].template item<double>());
    }
    groups.emplace_back(params, std::move(torchs));
    for (const auto& param : params) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end() &&
          !fit_for_torch(static_cast<State&>(*found->second), param, *options)) {
        optimizer.state().erase(found);
      }
    }
  }
  return groups;
}

/// Updates the states after LibTorch's step has run.
template <typename State, typename Options>
void follow_all(const char* function, torch::optim::Optimizer& optimizer,
                const ForeignParams& foreign) {
  for (const auto& [index, params] : foreign.groups()) {
    const OptionsOfGroup<Options> options(function, optimizer, optimizer.param_groups()[index]);
    for (const auto& param : params) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        follow_torch(static_cast<State&>(*found->second), param, *options);
      }
    }
  }
}

/// Steps parameters by LibTorch's optimizer of the same algorithm. State has two functions beside
/// it: fit_for_torch(state, param, options) prepares it for LibTorch's step, or returns false if
/// LibTorch is to make its own; follow_torch(state, param, options) updates it afterwards.
template <typename TorchOptimizer, typename State, typename Options>
void step_with_torch(const char* function, torch::optim::Optimizer& optimizer,
                     const ForeignParams& foreign, const AmpStep& amp_step,
                     at::ArrayRef<at::Tensor> rates) {
  check_not_captured(function, foreign.all());
  GradientsForTorch gradients(amp_step);
  const auto groups =
      groups_for_torch<State, Options>(function, optimizer, foreign, rates, gradients);
  if (is_skipped(amp_step)) {
    gradients.finish();
    return;
  }
  TorchOptimizer stand_in(groups, typename Options::Torch(1e-3));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    // The constructor may have changed them: LibTorch 2.15 sets what looks unset from the defaults.
    stand_in.param_groups()[i].set_options(groups[i].options().clone());
  }
  const auto give_back = [&] {
    move_states<State>(stand_in.state(), optimizer.state(), foreign.all());
    weights_changed(foreign.all());
  };
  move_states<State>(optimizer.state(), stand_in.state(), foreign.all());
  try {
    stand_in.step();
  } catch (...) {
    give_back();
    throw;
  }
  gradients.finish();
  give_back();
  follow_all<State, Options>(function, optimizer, foreign);
}

}  // namespace fastamp::optim
