#pragma once

// The options that a parameter group of our optimizers ends up with.
//
// LibTorch's Optimizer keeps them in every version for its own option types. Its versions differ in
// what becomes of fields that a group leaves alone, and some give groups of optimizers they do not
// know the optimizer's defaults, without a word: so ours are set here, by LibTorch's rule.

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

namespace fastamp::optim {

/// Whether this LibTorch fills in fields that a group's options leave as a new options object has
/// them, from the optimizer's defaults (2.15 does, 2.11 does not). Asked of torch::optim::SGD,
/// once.
bool groups_inherit();

/// Sets each field that is as in a new Options from the optimizer's defaults.
template <typename Options>
void inherit_unset(Options& group, const Options& defaults) {
  const Options unset(1e-3);  // LibTorch takes this rate as unset for SGD too, which has no default
  const auto inherit = [&](auto field) {
    if (field(group) == field(unset)) {
      field(group) = field(defaults);
    }
  };
  inherit([](auto& options) -> auto& { return options.lr(); });
  inherit([](auto& options) -> auto& { return options.weight_decay(); });
  inherit([](auto& options) -> auto& { return options.maximize(); });
  inherit([](auto& options) -> auto& { return options.state_dtype(); });
  inherit([](auto& options) -> auto& { return options.shadow_dtype(); });
  if constexpr (requires { group.momentum(); }) {
    inherit([](auto& options) -> auto& { return options.momentum(); });
    inherit([](auto& options) -> auto& { return options.dampening(); });
    inherit([](auto& options) -> auto& { return options.nesterov(); });
  } else {
    inherit([](auto& options) -> auto& { return options.betas(); });
    inherit([](auto& options) -> auto& { return options.eps(); });
    inherit([](auto& options) -> auto& { return options.amsgrad(); });
  }
}

/// @throws c10::TypeError if the group has options of another optimizer.
template <typename Options>
void check_group_options(const char* function, const torch::optim::OptimizerParamGroup& group) {
  if (group.has_options()) {
    const auto& options = group.options();
    TORCH_CHECK_TYPE(dynamic_cast<const Options*>(&options) != nullptr, function,
                     ": expected a parameter group with options of type ",
                     c10::demangle(typeid(Options).name()), ", got ",
                     c10::demangle(typeid(options).name()));
  }
}

/// A copy of the groups, for a constructor to hand to torch::optim::Optimizer.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> checked_groups(
    const char* function, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    check_group_options<Options>(function, group);
  }
  return groups;
}

/// Gives a group, as the optimizer holds it, the options that it was given with.
template <typename Options>
void set_group_options(torch::optim::OptimizerParamGroup& group,
                       const torch::optim::OptimizerParamGroup& given,
                       const torch::optim::OptimizerOptions& defaults) {
  if (!given.has_options()) {
    return;
  }
  auto options = std::make_unique<Options>(static_cast<const Options&>(given.options()));
  if (groups_inherit()) {
    inherit_unset(*options, static_cast<const Options&>(defaults));
  }
  group.set_options(std::move(options));
}

/// The same for all groups of an optimizer that was just constructed with these.
template <typename Options>
void set_all_group_options(torch::optim::Optimizer& optimizer,
                           const std::vector<torch::optim::OptimizerParamGroup>& given) {
  for (std::size_t i = 0; i < given.size(); ++i) {
    set_group_options<Options>(optimizer.param_groups()[i], given[i], optimizer.defaults());
  }
}

}  // namespace fastamp::optim
