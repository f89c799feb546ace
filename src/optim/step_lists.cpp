// SPDX-License-Identifier: Apache-2.0
#include "optim/step_lists.h"

#include "core/device_copy.h"
#include "ops/checks.h"

#include <fastamp/ops/fused_steps.h>

#include <ATen/ops/scalar_tensor.h>

#include <optional>

namespace fastamp::optim {
namespace {

std::optional<at::Tensor> tensor_on(const std::optional<at::Tensor>& tensor, c10::Device device) {
  if (!tensor || !tensor->defined()) {
    return std::nullopt;
  }
  return on_device(*tensor, device, tensor->scalar_type());
}

template <typename Call>
void call_sgd(const SgdLists& lists, const AmpStep& amp_step, const Call& call) {
  const auto here = amp_step_on(amp_step, lists.device);
  const auto rates = lists.learning_rates();
  call(ops::FusedSgdArgs{.params = lists.params.list(),
                         .grads = lists.grads,
                         .momentum_buffers = lists.momentum_buffers.list(),
                         .momentum_steps = lists.momentum_steps.list(),
                         .masters = lists.masters.list(),
                         .group_sizes = lists.group_sizes,
                         .lr = lists.lr,
                         .momentum = lists.momentum,
                         .dampening = lists.dampening,
                         .weight_decay = lists.weight_decay,
                         .nesterov = lists.nesterov,
                         .maximize = lists.maximize,
                         .lr_tensors = rates,
                         .weight_copies = lists.weight_copies,
                         .copy_of = lists.copy_of,
                         .inv_scale = here.inv_scale,
                         .clip_coef = here.clip_coef,
                         .found_inf = here.found_inf,
                         .clip_value = here.clip_value,
                         .write_grads = here.write_grads,
                         .noise_origins = lists.noise_origins});
}

template <typename Call>
void call_adam(const AdamLists& lists, const AmpStep& amp_step, const Call& call) {
  const auto here = amp_step_on(amp_step, lists.device);
  const auto rates = lists.learning_rates();
  call(ops::FusedAdamwArgs{.params = lists.params.list(),
                           .grads = lists.grads,
                           .exp_avgs = lists.exp_avgs.list(),
                           .exp_avg_sqs = lists.exp_avg_sqs.list(),
                           .max_exp_avg_sqs = lists.max_exp_avg_sqs.list(),
                           .state_steps = lists.steps.list(),
                           .masters = lists.masters.list(),
                           .group_sizes = lists.group_sizes,
                           .lr = lists.lr,
                           .beta1 = lists.beta1,
                           .beta2 = lists.beta2,
                           .eps = lists.eps,
                           .weight_decay = lists.weight_decay,
                           .decoupled = lists.decoupled,
                           .amsgrad = lists.amsgrad,
                           .maximize = lists.maximize,
                           .lr_tensors = rates,
                           .weight_copies = lists.weight_copies,
                           .copy_of = lists.copy_of,
                           .inv_scale = here.inv_scale,
                           .clip_coef = here.clip_coef,
                           .found_inf = here.found_inf,
                           .clip_value = here.clip_value,
                           .write_grads = here.write_grads,
                           .noise_origins = lists.noise_origins,
                           .moment_scales = lists.moment_scales.list()});
}

}  // namespace

at::Tensor rate_tensor(const at::Tensor& given, double otherwise, c10::Device device) {
  if (!given.defined()) {
    return at::scalar_tensor(otherwise, at::TensorOptions(at::kDouble));
  }
  const bool fits = given.scalar_type() == at::kFloat || given.scalar_type() == at::kDouble;
  const auto where = given.is_cpu() ? given.device() : device;
  return on_device(given, where, fits ? given.scalar_type() : at::kDouble);
}

void DeviceLists::reserve(std::size_t count) {
  params.reserve(count);
  grads.reserve(count);
}

void DeviceLists::open_group(std::size_t index, double rate, const at::Tensor& rate_tensor) {
  open = index;
  group_sizes.push_back(0);
  lr.push_back(rate);
  lr_tensors.push_back(rate_tensor);
  any_lr_tensor = any_lr_tensor || rate_tensor.defined();
}

void DeviceLists::insert_params(PointerSet& known) const {
  for (const auto& param : params.list()) {
    known.insert(param.unsafeGetTensorImpl());
  }
}

std::vector<at::Tensor> DeviceLists::learning_rates() const {
  std::vector<at::Tensor> rates;
  if (!any_lr_tensor) {
    return rates;
  }
  for (std::size_t i = 0; i < lr.size(); ++i) {
    rates.push_back(rate_tensor(lr_tensors[i], lr[i], device));
  }
  return rates;
}

void SgdLists::add_group(const SgdGroup& group) {
  momentum.push_back(group.momentum);
  dampening.push_back(group.dampening);
  weight_decay.push_back(group.weight_decay);
  nesterov.push_back(group.nesterov);
  maximize.push_back(group.maximize);
}

void SgdStep::run(const AmpStep& amp_step) {
  call_for_each([&](const auto& lists) { call_sgd(lists, amp_step, ops::check_fused_sgd); },
                [&](const auto& lists) { call_sgd(lists, amp_step, ops::fused_sgd_); });
}

void AdamLists::add_group(const AdamGroup& group) {
  beta1.push_back(group.beta1);
  beta2.push_back(group.beta2);
  eps.push_back(group.eps);
  weight_decay.push_back(group.weight_decay);
  decoupled.push_back(group.decoupled);
  amsgrad.push_back(group.amsgrad);
  maximize.push_back(group.maximize);
}

void AdamStep::run(const AmpStep& amp_step) {
  call_for_each([&](const auto& lists) { call_adam(lists, amp_step, ops::check_fused_adamw); },
                [&](const auto& lists) { call_adam(lists, amp_step, ops::fused_adamw_); });
}

AmpStep amp_step_on(const AmpStep& amp_step, c10::Device device) {
  return {.inv_scale = tensor_on(amp_step.inv_scale, device),
          .clip_coef = tensor_on(amp_step.clip_coef, device),
          .found_inf = tensor_on(amp_step.found_inf, device),
          .clip_value = amp_step.clip_value,
          .write_grads = amp_step.write_grads};
}

bool steps_on_host(const AmpStep& amp_step) {
  if (!amp_step.found_inf || !amp_step.found_inf->defined()) {
    return true;
  }
  const at::Tensor& flag = *amp_step.found_inf;
  return flag.is_cpu() && flag.numel() == 1 && flag.item<float>() == 0.0F;
}

}  // namespace fastamp::optim
