#include "optim/adam_family.h"
#include "optim/adam_state.h"
#include "optim/group_options.h"
#include "optim/option_archive.h"
#include "optim/option_checks.h"

#include <fastamp/optim/adam.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace fastamp::optim {
namespace {

constexpr const char* kLoad = "Adam::load";

std::unique_ptr<AdamOptions> checked(const AdamOptions& options) {
  check_adam_options("Adam", options);
  return std::make_unique<AdamOptions>(options);
}

}  // namespace

void AdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_options(archive, *this);
}

void AdamOptions::serialize(torch::serialize::InputArchive& archive) {
  read_adam_options(kLoad, archive, *this);
}

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
           const AdamOptions& defaults)
    : torch::optim::Optimizer(checked_groups<AdamOptions>("Adam", param_groups), checked(defaults)),
      shadows_(std::make_shared<autocast::Shadows>()) {
  set_all_group_options<AdamOptions>(*this, param_groups);
}

Adam::Adam(std::vector<at::Tensor> params, const AdamOptions& defaults)
    : Adam({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

void Adam::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  check_group_options<AdamOptions>("Adam::add_param_group", group);
  Optimizer::add_param_group(group);
  set_group_options<AdamOptions>(param_groups_.back(), group, *defaults_);
}

at::Tensor Adam::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  run_adam<AdamOptions, AdamParamState, /*kDecoupled=*/false>("Adam::step", *this, take_gate(),
                                                              learning_rates(), shadows_.get());
  return loss;
}

void Adam::save(torch::serialize::OutputArchive& archive) const {
  write_optimizer(archive, *this, no_adam_state);
}

void Adam::load(torch::serialize::InputArchive& archive) {
  read_optimizer<AdamParamState, AdamOptions>(kLoad, archive, *this, fit_adam<AdamOptions>);
}

}  // namespace fastamp::optim
