// SPDX-License-Identifier: Apache-2.0
#include "optim/adam_family.h"
#include "optim/adam_state.h"
#include "optim/group_options.h"
#include "optim/option_archive.h"
#include "optim/option_checks.h"
#include "optim/unstepped_states.h"

#include <fastamp/optim/adamw.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace fastamp::optim {
namespace {

constexpr const char* kAdamWLoad = "AdamW::load";

std::unique_ptr<AdamWOptions> checked(const AdamWOptions& options) {
  check_adam_options("AdamW", options);
  return std::make_unique<AdamWOptions>(options);
}

}  // namespace

std::unique_ptr<torch::optim::OptimizerOptions> AdamWOptions::clone() const {
  return std::make_unique<AdamWOptions>(*this);
}

void AdamWOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_options(archive, *this);
}

void AdamWOptions::serialize(torch::serialize::InputArchive& archive) {
  read_adam_options(kAdamWLoad, archive, *this);
}

std::unique_ptr<torch::optim::OptimizerParamState> AdamWParamState::clone() const {
  return std::make_unique<AdamWParamState>(*this);
}

void AdamWParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_state(archive, *this);
}

void AdamWParamState::serialize(torch::serialize::InputArchive& archive) {
  read_adam_state(kAdamWLoad, archive, *this);
}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
             const AdamWOptions& defaults)
    : torch::optim::Optimizer(checked_groups("AdamW", param_groups, defaults), checked(defaults)),
      copies_(std::make_shared<autocast::WeightCopies>()) {
  set_all_group_options<AdamWOptions>("AdamW", *this, param_groups);
  warn_once_of_narrow_moments<AdamWOptions>("AdamW", *this);
}

AdamW::AdamW(std::vector<at::Tensor> params, const AdamWOptions& defaults)
    : AdamW({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

void AdamW::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  constexpr const char* kFunction = "AdamW::add_param_group";
  expect_not_moved_from(kFunction, defaults_.get());
  check_group(kFunction, group, static_cast<const AdamWOptions&>(*defaults_));
  Optimizer::add_param_group(group);
  auto& added = param_groups_.back();
  set_group_options<AdamWOptions>(kFunction, added, group, *defaults_);
  warn_of_narrow_moments(kFunction, static_cast<const AdamWOptions&>(added.options()));
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  run_adam<AdamWOptions, AdamWParamState, /*kDecoupled=*/true>("AdamW::step", *this, take_gate(),
                                                               learning_rates(), copies_.get());
  return loss;
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  write_optimizer(archive, *this, no_adam_state<AdamWParamState>,
                  unstepped_states<AdamWParamState, AdamWOptions>("AdamW::save", *this));
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  read_optimizer<AdamWParamState, AdamWOptions>(kAdamWLoad, archive, *this,
                                                fit_adam<AdamWParamState, AdamWOptions>);
}

}  // namespace fastamp::optim
