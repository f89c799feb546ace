// SPDX-License-Identifier: Apache-2.0
#include "optim/group_options.h"
#include "optim/muon_step.h"
#include "optim/option_archive.h"
#include "optim/option_checks.h"
#include "optim/sgd_family.h"
#include "optim/unstepped_states.h"

#include <fastamp/optim/muon.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace fastamp::optim {
namespace {

constexpr const char* kLoadMuon = "Muon::load";

void check_options(const char* function, const MuonOptions& options) {
  check_not_negative(function, "lr", options.lr());
  check_not_negative(function, "momentum", options.momentum());
  check_not_negative(function, "weight_decay", options.weight_decay());
  TORCH_CHECK(options.ns_steps() >= 0 && options.ns_steps() < 100, function,
              ": expected ns_steps in [0, 100), got ", options.ns_steps());
  check_stored(function, options);
}

void check_matrix(const char* function, const at::Tensor& param) {
  TORCH_CHECK_TYPE(has_kernel(param), function,
                   ": expected float32, float16 or bfloat16 parameters on cpu or cuda, got ",
                   param.scalar_type(), " on ", param.device(), " with layout ", param.layout());
  TORCH_CHECK_VALUE(param.dim() == 2, function, ": expected parameters of two dimensions, got ",
                    "shape ", param.sizes(), "; other optimizers step those");
}

void check_muon_group(const char* function, const torch::optim::OptimizerParamGroup& group,
                      const MuonOptions& defaults) {
  check_group(function, group, defaults);
  if (group.has_options()) {
    check_options(function, as_own_options<MuonOptions>(function, group.options(), defaults));
  }
  for (const auto& param : group.params()) {
    check_matrix(function, param);
  }
}

std::vector<torch::optim::OptimizerParamGroup> checked_matrices(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const MuonOptions& defaults) {
  for (const auto& group : groups) {
    check_muon_group("Muon", group, defaults);
  }
  return groups;
}

std::unique_ptr<MuonOptions> checked_muon(const MuonOptions& options) {
  check_options("Muon", options);
  return std::make_unique<MuonOptions>(options);
}

MuonGroup muon_group(const MuonOptions& options, const at::Tensor& rate) {
  const auto [a, b, c] = options.ns_coefficients();
  return {.lr = options.lr(),
          .lr_tensor = rate,
          .momentum = options.momentum(),
          .weight_decay = options.weight_decay(),
          .nesterov = options.nesterov(),
          .rate = options.adjust_lr_fn(),
          .iteration = {a, b, c, options.eps(), options.ns_steps(), options.ns_dtype()}};
}

/// Puts a parameter with a gradient on the step's lists. False if it was added before.
/// @param number  Of the parameter, counted from 1 over all groups.
bool add_matrix(const char* function, torch::optim::Optimizer& optimizer,
                const MuonOptions& options, const at::Tensor& param, std::size_t number,
                MuonStep& step) {
  static const at::Tensor none;
  const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
  check_matrix(function, param);
  TORCH_CHECK_TYPE(grad.layout() == at::kStrided, function,
                   ": expected dense gradients, got one with layout ", grad.layout());
  auto& state = state_for<MuonParamState>(function, optimizer.state(), param);
  bring_moment(state.momentum_buffer(), param, options.state_dtype());
  return step.add(param, grad, state.momentum_buffer(),
                  master_in(state, param, options, is_16_bit(param), none),
                  origin_in(options, number), state.steps());
}

void run_muon(const char* function, torch::optim::Optimizer& optimizer, const AmpStep& amp_step,
              at::ArrayRef<at::Tensor> rates, autocast::WeightCopies* weight_copies) {
  const at::NoGradGuard no_grad;
  check_rates(function, rates, optimizer.param_groups().size());
  for (const auto& group : optimizer.param_groups()) {
    check_options(function, static_cast<const MuonOptions&>(group.options()));
  }
  MuonStep step;
  autocast::CopyingStep copying(weight_copies);
  std::size_t index = 0;
  std::size_t number = 0;  // of parameters so far
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    step.begin_group(muon_group(options, rate_of(rates, index)));
    for (const auto& param : group.params()) {
      if (++number; param.unsafeGetTensorImpl()->grad().defined() &&
                    add_matrix(function, optimizer, options, param, number, step)) {
        add_copy(step, copying, param, options);
      }
    }
    ++index;
  }
  step.run(amp_step);
  copying.finish();
}

void fit_muon(const char* function, MuonParamState& state, const at::Tensor& param,
              const MuonOptions& options) {
  state.momentum_buffer(
      fitted(function, "momentum_buffer", state.momentum_buffer(), param, options.state_dtype()));
  state.master(fitted(function, "master", state.master(), param, at::kFloat));
  state.remainder(fitted(function, "master_remainder", state.remainder(), param, at::kShort));
  state.steps(counter_for(param, read_counter(state.steps())));
}

bool always_saved(const torch::optim::OptimizerParamState& /*state*/) { return false; }

}  // namespace

MuonOptions::MuonOptions(double lr) : lr_(lr) {}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr()));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("momentum", c10::IValue(momentum()));
  archive.write("nesterov", c10::IValue(nesterov()));
  archive.write("ns_coefficients", c10::IValue(ns_coefficients()));
  archive.write("eps", c10::IValue(eps()));
  archive.write("ns_steps", c10::IValue(ns_steps()));
  archive.write("adjust_lr_fn", c10::IValue(static_cast<std::int64_t>(adjust_lr_fn())));
  archive.write("ns_dtype", c10::IValue(static_cast<std::int64_t>(ns_dtype())));
  write_extras(archive, *this);
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  lr(read_entry(archive, kLoadMuon, "lr").toDouble());
  weight_decay(read_entry(archive, kLoadMuon, "weight_decay").toDouble());
  momentum(read_entry(archive, kLoadMuon, "momentum").toDouble());
  nesterov(read_entry(archive, kLoadMuon, "nesterov").toBool());
  ns_coefficients(read_entry(archive, kLoadMuon, "ns_coefficients").to<Coefficients>());
  eps(read_entry(archive, kLoadMuon, "eps").toDouble());
  ns_steps(read_entry(archive, kLoadMuon, "ns_steps").toInt());
  adjust_lr_fn(static_cast<MuonRate>(read_entry(archive, kLoadMuon, "adjust_lr_fn").toInt()));
  ns_dtype(static_cast<c10::ScalarType>(read_entry(archive, kLoadMuon, "ns_dtype").toInt()));
  read_extras(archive, *this);
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_tensor(archive, "momentum_buffer", momentum_buffer());
  archive.write("momentum_steps", c10::IValue(read_counter(steps())));
  write_tensor(archive, "master", master());
  write_tensor(archive, "master_remainder", remainder());
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  momentum_buffer(read_tensor(archive, "momentum_buffer"));
  steps(counter_on(c10::kCPU, read_int(archive, "momentum_steps").value_or(0)));
  master(read_tensor(archive, "master"));
  remainder(read_tensor(archive, "master_remainder"));
}

Muon::Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
           const MuonOptions& defaults)
    : torch::optim::Optimizer(checked_matrices(param_groups, defaults), checked_muon(defaults)),
      copies_(std::make_shared<autocast::WeightCopies>()) {
  set_all_group_options<MuonOptions>("Muon", *this, param_groups);
}

Muon::Muon(std::vector<at::Tensor> params, const MuonOptions& defaults)
    : Muon({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

void Muon::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  constexpr const char* kFunction = "Muon::add_param_group";
  expect_not_moved_from(kFunction, defaults_.get());
  check_muon_group(kFunction, group, static_cast<const MuonOptions&>(*defaults_));
  Optimizer::add_param_group(group);
  set_group_options<MuonOptions>(kFunction, param_groups_.back(), group, *defaults_);
}

at::Tensor Muon::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  run_muon("Muon::step", *this, take_amp_step(), learning_rates(), copies_.get());
  return loss;
}

void Muon::save(torch::serialize::OutputArchive& archive) const {
  write_optimizer(archive, *this, always_saved,
                  unstepped_states<MuonParamState, MuonOptions>("Muon::save", *this));
}

void Muon::load(torch::serialize::InputArchive& archive) {
  read_optimizer<MuonParamState, MuonOptions>(kLoadMuon, archive, *this, fit_muon);
}

}  // namespace fastamp::optim
