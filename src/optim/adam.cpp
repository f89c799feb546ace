// SPDX-License-Identifier: Apache-2.0
#include "optim/adam_family.h"
#include "optim/adam_state.h"
#include "optim/group_options.h"
#include "optim/option_archive.h"
#include "optim/option_checks.h"
#include "optim/unstepped_states.h"

#include <fastamp/optim/adam.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace fastamp::optim {
namespace {

constexpr const char* kAdamLoad = "Adam::load";

std::unique_ptr<AdamOptions> checked(const AdamOptions& options) {
  check_adam_options("Adam", options);
  return std::make_unique<AdamOptions>(options);
}

}  // namespace

std::unique_ptr<torch::optim::OptimizerOptions> AdamOptions::clone() const {
  return std::make_unique<AdamOptions>(*this);
}

void AdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_options(archive, *this);
}

void AdamOptions::serialize(torch::serialize::InputArchive& archive) {
  read_adam_options(kAdamLoad, archive, *this);
}

std::unique_ptr<torch::optim::OptimizerParamState> AdamParamState::clone() const {
  return std::make_unique<AdamParamState>(*this);
}

void AdamParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_state(archive, *this);
}

void AdamParamState::serialize(torch::serialize::InputArchive& archive) {
  read_adam_state(kAdamLoad, archive, *this);
}

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
           const AdamOptions& defaults)
    : torch::optim::Optimizer(checked_groups("Adam", param_groups, defaults), checked(defaults)),
      copies_(std::make_shared<autocast::WeightCopies>()) {
  set_all_group_options<AdamOptions>("Adam", *this, param_groups);
  warn_once_of_narrow_moments<AdamOptions>("Adam", *this);
}

Adam::Adam(std::vector<at::Tensor> params, const AdamOptions& defaults)
    : Adam({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

void Adam::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  constexpr const char* kFunction = "Adam::add_param_group";
  expect_not_moved_from(kFunction, defaults_.get());
  check_group(kFunction, group, static_cast<const AdamOptions&>(*defaults_));
  Optimizer::add_param_group(group);
  auto& added = param_groups_.back();
  set_group_options<AdamOptions>(kFunction, added, group, *defaults_);
  warn_of_narrow_moments(kFunction, static_cast<const AdamOptions&>(added.options()));
}

at::Tensor Adam::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  run_adam<AdamOptions, AdamParamState, /*kDecoupled=*/false>("Adam::step", *this, take_gate(),
                                                              learning_rates(), copies_.get());
  return loss;
}

void Adam::save(torch::serialize::OutputArchive& archive) const {
  write_optimizer(archive, *this, no_adam_state<AdamParamState>,
                  unstepped_states<AdamParamState, AdamOptions>("Adam::save", *this));
}

void Adam::load(torch::serialize::InputArchive& archive) {
  read_optimizer<AdamParamState, AdamOptions>(kAdamLoad, archive, *this,
                                              fit_adam<AdamParamState, AdamOptions>);
}

}  // namespace fastamp::optim
