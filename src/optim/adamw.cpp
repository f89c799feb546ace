#include "optim/adam_family.h"
#include "optim/adam_state.h"
#include "optim/group_options.h"
#include "optim/option_archive.h"
#include "optim/option_checks.h"

#include <fastamp/optim/adamw.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace fastamp::optim {
namespace {

constexpr const char* kLoad = "AdamW::load";

std::unique_ptr<AdamWOptions> checked(const AdamWOptions& options) {
  check_adam_options("AdamW", options);
  return std::make_unique<AdamWOptions>(options);
}

}  // namespace

void AdamWOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_adam_options(archive, *this);
}

void AdamWOptions::serialize(torch::serialize::InputArchive& archive) {
  read_adam_options(kLoad, archive, *this);
}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
             const AdamWOptions& defaults)
    : torch::optim::Optimizer(checked_groups<AdamWOptions>("AdamW", param_groups),
                              checked(defaults)),
      shadows_(std::make_shared<autocast::Shadows>()) {
  set_all_group_options<AdamWOptions>(*this, param_groups);
}

AdamW::AdamW(std::vector<at::Tensor> params, const AdamWOptions& defaults)
    : AdamW({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

void AdamW::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  check_group_options<AdamWOptions>("AdamW::add_param_group", group);
  Optimizer::add_param_group(group);
  set_group_options<AdamWOptions>(param_groups_.back(), group, *defaults_);
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  run_adam<AdamWOptions, AdamParamState, /*kDecoupled=*/true>("AdamW::step", *this, take_gate(),
                                                              learning_rates(), shadows_.get());
  return loss;
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  write_optimizer(archive, *this, no_adam_state);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  read_optimizer<AdamParamState, AdamWOptions>(kLoad, archive, *this, fit_adam<AdamWOptions>);
}

}  // namespace fastamp::optim
