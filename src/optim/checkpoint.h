// SPDX-License-Identifier: Apache-2.0
#pragma once

// Archives of optimizers, in the layout that LibTorch's have had since 1.5, so that they can be
// exchanged:
//   pytorch_version             "1.5.0"
//   state/<id>/<entry>          <id> names a parameter: a number that only has to be unique
//   param_groups/param_groups/{size, <i>/{params/{size, <j>} = <id>, options/<option>}}

#include "optim/group_options.h"
#include "optim/param_state.h"
#include "optim/starting_masters.h"

#include <torch/optim/optimizer.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fastamp::optim {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// A parameter group as an archive has it.
struct SavedGroup {
  std::vector<std::string> ids;
  torch::serialize::InputArchive options;
};

/// The groups of an archive, in order.
/// @throws c10::Error unless there are as many groups and parameters as `optimizer` has.
std::vector<SavedGroup> read_groups(const char* function, torch::serialize::InputArchive& archive,
                                    const torch::optim::Optimizer& optimizer);

/// The states of an archive, by id.
/// @throws c10::Error if this is not an optimizer's archive.
torch::serialize::InputArchive read_states(const char* function,
                                           torch::serialize::InputArchive& archive);

/// Writes all states except those for which `skip` is true: they have nothing to save.
/// @param more  States of parameters for which the optimizer has none.
void write_optimizer(torch::serialize::OutputArchive& archive,
                     const torch::optim::Optimizer& optimizer,
                     bool (*skip)(const torch::optim::OptimizerParamState& state),
                     const StateMap& more);

/// An entry that must exist.
c10::IValue read_entry(torch::serialize::InputArchive& archive, const char* function,
                       const std::string& key);

/// A loaded tensor in the shape, layout and place of param's own state.
/// @throws c10::ValueError if it has another shape.
at::Tensor fitted(const char* function, const char* name, const at::Tensor& loaded,
                  const at::Tensor& param, at::ScalarType dtype);

/// Reads an optimizer; changes it only when everything was read.
/// @param fit  Called with (function, state, param, options): brings a loaded state to its place.
template <typename State, typename Options, typename Fit>
void read_optimizer(const char* function, torch::serialize::InputArchive& archive,
                    torch::optim::Optimizer& optimizer, const Fit& fit) {
  auto states = read_states(function, archive);
  auto groups = read_groups(function, archive, optimizer);
  std::vector<Options> options;
  StateMap loaded;
  std::vector<const c10::TensorImpl*> loaded_masters;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    // A copy of the current ones: options that LibTorch's archives do not have keep their values.
    const auto current = as_own_options<Options>(function, group.options(), optimizer.defaults());
    options.push_back(current);
    options.back().serialize(groups[i].options);
    check_stored(function, options.back());
    keep_stored(options.back(), current);
    for (std::size_t j = 0; j < groups[i].ids.size(); ++j) {
      torch::serialize::InputArchive entry;
      if (!states.try_read(groups[i].ids[j], entry)) {
        continue;
      }
      const auto& param = group.params()[j];
      auto state = std::make_unique<State>();
      state->serialize(entry);
      fit(function, *state, param, options.back());
      if (state->master().defined() || state->remainder().defined()) {
        loaded_masters.push_back(param.unsafeGetTensorImpl());
      }
      loaded[param.unsafeGetTensorImpl()] = std::move(state);
    }
  }
  optimizer.state() = std::move(loaded);
  for (const auto* param : loaded_masters) {
    forget_starting_master(param);
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    assign_options(optimizer.param_groups()[i].options(), options[i]);
  }
}

}  // namespace fastamp::optim
