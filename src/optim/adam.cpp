// SPDX-License-Identifier: Apache-2.0
#include "optim/adam_family.h"
#include "optim/adam_state.h"
#include "optim/group_options.h"
#include "optim/option_archive.h"
#include "optim/option_checks.h"
#include "optim/unstepped_states.h"

#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace fastamp::optim {
namespace {

/// Names in messages.
template <bool kDecoupled>
struct Names {
  static constexpr const char* kClass = "Adam";
  static constexpr const char* kAddGroup = "Adam::add_param_group";
  static constexpr const char* kStep = "Adam::step";
  static constexpr const char* kSave = "Adam::save";
  static constexpr const char* kLoad = "Adam::load";
};
template <>
struct Names<true> {
  static constexpr const char* kClass = "AdamW";
  static constexpr const char* kAddGroup = "AdamW::add_param_group";
  static constexpr const char* kStep = "AdamW::step";
  static constexpr const char* kSave = "AdamW::save";
  static constexpr const char* kLoad = "AdamW::load";
};

template <bool kDecoupled>
std::unique_ptr<AdamFamilyOptions<kDecoupled>> checked(
    const AdamFamilyOptions<kDecoupled>& options) {
  check_adam_options(Names<kDecoupled>::kClass, options);
  return std::make_unique<AdamFamilyOptions<kDecoupled>>(options);
}

}  // namespace

// NOLINTBEGIN(misc-override-with-different-visibility): LibTorch calls them through its bases
template <bool kDecoupled>
std::unique_ptr<torch::optim::OptimizerOptions> AdamFamilyOptions<kDecoupled>::clone() const {
  return std::make_unique<AdamFamilyOptions>(*this);
}

template <bool kDecoupled>
void AdamFamilyOptions<kDecoupled>::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_options(archive, *this);
}

template <bool kDecoupled>
void AdamFamilyOptions<kDecoupled>::serialize(torch::serialize::InputArchive& archive) {
  read_adam_options(Names<kDecoupled>::kLoad, archive, *this);
}

template <bool kDecoupled>
std::unique_ptr<torch::optim::OptimizerParamState> AdamFamilyParamState<kDecoupled>::clone() const {
  return std::make_unique<AdamFamilyParamState>(*this);
}

template <bool kDecoupled>
void AdamFamilyParamState<kDecoupled>::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_state(archive, *this);
}

template <bool kDecoupled>
void AdamFamilyParamState<kDecoupled>::serialize(torch::serialize::InputArchive& archive) {
  read_adam_state(Names<kDecoupled>::kLoad, archive, *this);
}

// NOLINTEND(misc-override-with-different-visibility)

template <bool kDecoupled>
AdamFamily<kDecoupled>::AdamFamily(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    const AdamFamilyOptions<kDecoupled>& defaults)
    : torch::optim::Optimizer(checked_groups(Names<kDecoupled>::kClass, param_groups, defaults),
                              checked(defaults)),
      copies_(std::make_shared<autocast::WeightCopies>()) {
  using Options = AdamFamilyOptions<kDecoupled>;
  set_all_group_options<Options>(Names<kDecoupled>::kClass, *this, param_groups);
  warn_once_of_narrow_moments<Options>(Names<kDecoupled>::kClass, *this);
}

template <bool kDecoupled>
AdamFamily<kDecoupled>::AdamFamily(std::vector<at::Tensor> params,
                                   const AdamFamilyOptions<kDecoupled>& defaults)
    : AdamFamily({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

template <bool kDecoupled>
void AdamFamily<kDecoupled>::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  using Options = AdamFamilyOptions<kDecoupled>;
  constexpr const char* kFunction = Names<kDecoupled>::kAddGroup;
  expect_not_moved_from(kFunction, defaults_.get());
  check_group(kFunction, group, static_cast<const Options&>(*defaults_));
  Optimizer::add_param_group(group);
  auto& added = param_groups_.back();
  set_group_options<Options>(kFunction, added, group, *defaults_);
  warn_of_narrow_moments(kFunction, static_cast<const Options&>(added.options()));
}

template <bool kDecoupled>
at::Tensor AdamFamily<kDecoupled>::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  run_adam<AdamFamilyOptions<kDecoupled>, AdamFamilyParamState<kDecoupled>, kDecoupled>(
      Names<kDecoupled>::kStep, *this, take_amp_step(), learning_rates(), copies_.get());
  return loss;
}

template <bool kDecoupled>
void AdamFamily<kDecoupled>::save(torch::serialize::OutputArchive& archive) const {
  using State = AdamFamilyParamState<kDecoupled>;
  write_optimizer(
      archive, *this, no_adam_state<State>,
      unstepped_states<State, AdamFamilyOptions<kDecoupled>>(Names<kDecoupled>::kSave, *this));
}

template <bool kDecoupled>
void AdamFamily<kDecoupled>::load(torch::serialize::InputArchive& archive) {
  using State = AdamFamilyParamState<kDecoupled>;
  using Options = AdamFamilyOptions<kDecoupled>;
  read_optimizer<State, Options>(Names<kDecoupled>::kLoad, archive, *this,
                                 fit_adam<State, Options>);
}

template struct AdamFamilyOptions<false>;
template struct AdamFamilyOptions<true>;
template struct AdamFamilyParamState<false>;
template struct AdamFamilyParamState<true>;
// NOLINTBEGIN(misc-multiple-inheritance): see the class
template class AdamFamily<false>;
template class AdamFamily<true>;
// NOLINTEND(misc-multiple-inheritance)

}  // namespace fastamp::optim
