// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options that a parameter group of our optimizers ends up with.
//
// LibTorch's Optimizer keeps them in every version for its own option types. Its versions treat
// fields that a group leaves alone differently, and some silently give groups of optimizers they do
// not know the optimizer's defaults: so fastamp's are set here, by LibTorch's rule.
//
// A group may come with LibTorch's own options. Constructors and add_param_group convert them to
// fastamp's; those that set_options() or the base class's add_param_group put there stay as they
// are, since the program may hold a reference to them, and the step reads them as if they were
// fastamp's.

#include "optim/option_checks.h"
#include "optim/starting_masters.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

namespace fastamp::optim {

/// Refuses an optimizer that was moved from: it has lost its defaults.
/// @throws c10::Error
inline void expect_not_moved_from(const char* function,
                                  const torch::optim::OptimizerOptions* defaults) {
  TORCH_CHECK(defaults != nullptr, function,
              ": expected an optimizer, got one that was moved from. Assign another one to it, or "
              "call the one that it was moved to.");
}

/// Whether this LibTorch fills in fields that a group's options leave as a new options object has
/// them, from the optimizer's defaults (2.15 does, 2.11 does not). Asked of torch::optim::SGD,
/// once.
bool groups_inherit();

/// Sets a field that is as in a new Options from other options.
template <typename Options, typename Field>
void inherit_field(Options& options, const Options& from, const Field& field) {
  const Options unset(1e-3);  // LibTorch takes this rate as unset for SGD too, which has no default
  if (field(options) == field(unset)) {
    field(options) = field(from);
  }
}

/// Reads those that say how state is stored.
template <typename Options>
void inherit_stored(Options& options, const Options& from) {
  inherit_field(options, from, [](auto& of) -> auto& { return of.state_dtype(); });
  inherit_field(options, from, [](auto& of) -> auto& { return of.master(); });
  if constexpr (requires { options.state_rounding(); }) {
    inherit_field(options, from, [](auto& of) -> auto& { return of.state_rounding(); });
  }
  if constexpr (requires { options.ns_dtype(); }) {
    inherit_field(options, from, [](auto& of) -> auto& { return of.ns_dtype(); });
  }
}

/// Gives options that were loaded into a group what the group says of how state is stored; where it
/// has what a new Options has, it says nothing. Roundings are no layout: they are the archive's.
template <typename Options>
void keep_stored(Options& loaded, Options group) {
  inherit_stored(group, loaded);
  loaded.state_dtype(group.state_dtype()).master(group.master());
  if constexpr (requires { group.ns_dtype(); }) {
    loaded.ns_dtype(group.ns_dtype());
  }
}

/// Sets each field that is as in a new Options from the optimizer's defaults.
template <typename Options>
void inherit_unset(Options& group, const Options& defaults) {
  const auto inherit = [&](const auto& field) { inherit_field(group, defaults, field); };
  inherit([](auto& options) -> auto& { return options.lr(); });
  inherit([](auto& options) -> auto& { return options.weight_decay(); });
  inherit_stored(group, defaults);
  inherit([](auto& options) -> auto& { return options.autocast_dtype(); });
  if constexpr (requires { group.maximize(); }) {
    inherit([](auto& options) -> auto& { return options.maximize(); });
  }
  if constexpr (requires { group.momentum(); }) {
    inherit([](auto& options) -> auto& { return options.momentum(); });
    inherit([](auto& options) -> auto& { return options.nesterov(); });
  }
  if constexpr (requires { group.dampening(); }) {
    inherit([](auto& options) -> auto& { return options.dampening(); });
  }
  if constexpr (requires { group.eps(); }) {
    inherit([](auto& options) -> auto& { return options.eps(); });
  }
  if constexpr (requires { group.betas(); }) {
    inherit([](auto& options) -> auto& { return options.betas(); });
    inherit([](auto& options) -> auto& { return options.amsgrad(); });
  }
  if constexpr (requires { group.ns_steps(); }) {
    inherit([](auto& options) -> auto& { return options.ns_coefficients(); });
    inherit([](auto& options) -> auto& { return options.ns_steps(); });
    inherit([](auto& options) -> auto& { return options.adjust_lr_fn(); });
  }
}

/// Returns fastamp's options, or makes them of LibTorch's: those that LibTorch does not have come
/// from the defaults.
/// @throws c10::TypeError if they are those of another optimizer.
template <typename Options>
Options as_own_options(const char* function, const torch::optim::OptimizerOptions& given,
                       const torch::optim::OptimizerOptions& defaults) {
  if (const auto* own = dynamic_cast<const Options*>(&given)) {
    return *own;
  }
  const auto own = c10::demangle(typeid(Options).name());
  const auto got = c10::demangle(typeid(given).name());
  if constexpr (requires { typename Options::Torch; }) {
    using Torch = Options::Torch;
    const auto* torchs = dynamic_cast<const Torch*>(&given);
    TORCH_CHECK_TYPE(torchs != nullptr, function,
                     ": expected a parameter group with options of type ", own, " or ",
                     c10::demangle(typeid(Torch).name()), ", got ", got);
    Options options(static_cast<const Options&>(defaults));
    static_cast<Torch&>(options) = *torchs;
    return options;
  }
  TORCH_CHECK_TYPE(false, function, ": expected a parameter group with options of type ", own,
                   ", got ", got);
}

/// The options of a group for as long as this lives, unchanged.
template <typename Options>
class OptionsOfGroup {
 public:
  /// @throws c10::TypeError  as as_own_options.
  OptionsOfGroup(const char* function, const torch::optim::Optimizer& optimizer,
                 const torch::optim::OptimizerParamGroup& group) {
    const auto& given = group.options();
    if constexpr (requires { typename Options::Torch; }) {
      if (typeid(given) != typeid(Options)) [[unlikely]] {
        converted_.emplace(as_own_options<Options>(function, given, optimizer.defaults()));
        options_ = &*converted_;
        return;
      }
    }
    options_ = &static_cast<const Options&>(given);
  }
  ~OptionsOfGroup() = default;
  OptionsOfGroup(const OptionsOfGroup&) = delete;
  OptionsOfGroup& operator=(const OptionsOfGroup&) = delete;

  const Options& operator*() const { return *options_; }

 private:
  std::optional<Options> converted_;
  const Options* options_ = nullptr;
};

/// The dtype that a group's state is stored in; torch's own options have none, and float32 state.
template <typename Options>
at::ScalarType state_dtype(const Options& options) {
  if constexpr (requires { options.state_dtype(); }) {
    return options.state_dtype();
  } else {
    return at::kFloat;
  }
}

/// Overwrites the options of a group, be they fastamp's or LibTorch's.
template <typename Options>
void assign_options(torch::optim::OptimizerOptions& target, const Options& options) {
  if (auto* own = dynamic_cast<Options*>(&target)) {
    *own = options;
  } else if constexpr (requires { typename Options::Torch; }) {
    // NOLINTNEXTLINE(cppcoreguidelines-slicing): LibTorch's have no place for the others
    dynamic_cast<Options::Torch&>(target) = options;
  }
}

/// @throws c10::ValueError if a parameter is undefined.
void check_parameters(const char* function, const torch::optim::OptimizerParamGroup& group);

/// @throws c10::Error if one of its options has a value that a step does not know.
/// @throws c10::TypeError if the group has options of another optimizer.
/// @throws c10::ValueError if a parameter is undefined.
template <typename Options>
void check_group(const char* function, const torch::optim::OptimizerParamGroup& group,
                 const Options& defaults) {
  check_parameters(function, group);
  if (group.has_options()) {
    check_stored(function, as_own_options<Options>(function, group.options(), defaults));
  }
}

/// Refuses values in the groups' options, which may have been edited, before any group is stepped.
template <typename Options>
void check_groups(const char* function, const torch::optim::Optimizer& optimizer) {
  if constexpr (requires(const Options& options) { options.state_dtype(); }) {
    for (const auto& group : optimizer.param_groups()) {
      check_stored(function, *OptionsOfGroup<Options>(function, optimizer, group));
    }
  }
}

/// A copy of the groups, for a constructor to hand to torch::optim::Optimizer.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> checked_groups(
    const char* function, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const Options& defaults) {
  for (const auto& group : groups) {
    check_group(function, group, defaults);
  }
  return groups;
}

/// Gives a group that the optimizer holds the options that it was added with.
template <typename Options>
void set_group_options(const char* function, torch::optim::OptimizerParamGroup& group,
                       const torch::optim::OptimizerParamGroup& given,
                       const torch::optim::OptimizerOptions& defaults) {
  if (!given.has_options()) {
    return;
  }
  auto options =
      std::make_unique<Options>(as_own_options<Options>(function, given.options(), defaults));
  if (groups_inherit()) {
    inherit_unset(*options, static_cast<const Options&>(defaults));
  }
  group.set_options(std::move(options));
}

/// Does so for all groups of an optimizer that was just constructed with these. What is known of
/// frozen parameters' masters goes: an optimizer is made when it is clear what is trained.
template <typename Options>
void set_all_group_options(const char* function, torch::optim::Optimizer& optimizer,
                           const std::vector<torch::optim::OptimizerParamGroup>& given) {
  for (std::size_t i = 0; i < given.size(); ++i) {
    set_group_options<Options>(function, optimizer.param_groups()[i], given[i],
                               optimizer.defaults());
  }
  forget_frozen_starting_masters();
}

}  // namespace fastamp::optim
