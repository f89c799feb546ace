// SPDX-License-Identifier: Apache-2.0
#include "optim/group_options.h"
#include "optim/option_archive.h"
#include "optim/option_checks.h"
#include "optim/sgd_family.h"
#include "optim/unstepped_states.h"

#include <fastamp/optim/sgd.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace fastamp::optim {
namespace {

constexpr const char* kLoad = "SGD::load";

void fit(const char* function, SGDParamState& state, const at::Tensor& param,
         const SGDOptions& options) {
  const auto dtype = has_kernel(param) ? options.state_dtype() : param.scalar_type();
  state.momentum_buffer(fitted(function, "momentum_buffer", state.momentum_buffer(), param, dtype));
  state.master(fitted(function, "master", state.master(), param, at::kFloat));
  state.remainder(fitted(function, "master_remainder", state.remainder(), param, at::kShort));
  state.steps(counter_for(param, read_counter(state.steps())));
}

/// LibTorch's SGD has no state without a momentum buffer that holds something.
bool nothing_to_save(const torch::optim::OptimizerParamState& state) {
  const auto& sgd = static_cast<const SGDParamState&>(state);
  return !sgd.master().defined() && !sgd.remainder().defined() && read_counter(sgd.steps()) == 0;
}

std::unique_ptr<SGDOptions> checked(const SGDOptions& options) {
  check_not_negative("SGD", "lr", options.lr());
  check_not_negative("SGD", "momentum", options.momentum());
  check_not_negative("SGD", "weight_decay", options.weight_decay());
  TORCH_CHECK(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
              "SGD: expected momentum > 0 and dampening = 0 with nesterov, got momentum ",
              options.momentum(), " and dampening ", options.dampening(),
              ". Nesterov momentum requires a momentum and zero dampening");
  check_stored("SGD", options);
  return std::make_unique<SGDOptions>(options);
}

}  // namespace

AmpStepOptimizer::~AmpStepOptimizer() = default;

std::unique_ptr<torch::optim::OptimizerOptions> SGDOptions::clone() const {
  return std::make_unique<SGDOptions>(*this);
}

void SGDOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr()));
  archive.write("momentum", c10::IValue(momentum()));
  archive.write("dampening", c10::IValue(dampening()));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("nesterov", c10::IValue(nesterov()));
  write_extras(archive, *this);
}

void SGDOptions::serialize(torch::serialize::InputArchive& archive) {
  lr(read_entry(archive, kLoad, "lr").toDouble());
  momentum(read_entry(archive, kLoad, "momentum").toDouble());
  dampening(read_entry(archive, kLoad, "dampening").toDouble());
  weight_decay(read_entry(archive, kLoad, "weight_decay").toDouble());
  nesterov(read_entry(archive, kLoad, "nesterov").toBool());
  read_extras(archive, *this);
}

std::unique_ptr<torch::optim::OptimizerParamState> SGDParamState::clone() const {
  return std::make_unique<SGDParamState>(*this);
}

void SGDParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_tensor(archive, "momentum_buffer", momentum_buffer());
  archive.write("momentum_steps", c10::IValue(read_counter(steps())));
  write_tensor(archive, "master", master());
  write_tensor(archive, "master_remainder", remainder());
}

void SGDParamState::serialize(torch::serialize::InputArchive& archive) {
  momentum_buffer(read_tensor(archive, "momentum_buffer"));
  master(read_tensor(archive, "master"));
  remainder(read_tensor(archive, "master_remainder"));
  // LibTorch's has no counter: its buffer exists from the first step on.
  const auto count = read_int(archive, "momentum_steps");
  steps(counter_on(c10::kCPU, count.value_or(momentum_buffer().defined() ? 1 : 0)));
}

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
         const SGDOptions& defaults)
    : torch::optim::Optimizer(checked_groups("SGD", param_groups, defaults), checked(defaults)),
      copies_(std::make_shared<autocast::WeightCopies>()) {
  set_all_group_options<SGDOptions>("SGD", *this, param_groups);
}

SGD::SGD(std::vector<at::Tensor> params, const SGDOptions& defaults)
    : SGD({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

void SGD::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  constexpr const char* kFunction = "SGD::add_param_group";
  expect_not_moved_from(kFunction, defaults_.get());
  check_group(kFunction, group, static_cast<const SGDOptions&>(*defaults_));
  Optimizer::add_param_group(group);
  set_group_options<SGDOptions>(kFunction, param_groups_.back(), group, *defaults_);
}

at::Tensor SGD::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  run_sgd<SGDOptions, SGDParamState>("SGD::step", *this, take_amp_step(), learning_rates(),
                                     copies_.get());
  return loss;
}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  write_optimizer(archive, *this, nothing_to_save,
                  unstepped_states<SGDParamState, SGDOptions>("SGD::save", *this));
}

void SGD::load(torch::serialize::InputArchive& archive) {
  read_optimizer<SGDParamState, SGDOptions>(kLoad, archive, *this, fit);
}

}  // namespace fastamp::optim
