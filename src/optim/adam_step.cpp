// SPDX-License-Identifier: Apache-2.0
#include "optim/adam_step.h"

#include "ops/checks.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::optim {
namespace {

template <typename Lists, typename Call>
void call_with_lists(const Lists& lists, const AmpStep& amp_step, const Call& call) {
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

void AdamStep::Lists::add_group(const AdamGroup& group) {
  beta1.push_back(group.beta1);
  beta2.push_back(group.beta2);
  eps.push_back(group.eps);
  weight_decay.push_back(group.weight_decay);
  decoupled.push_back(group.decoupled);
  amsgrad.push_back(group.amsgrad);
  maximize.push_back(group.maximize);
}

void AdamStep::run(const AmpStep& amp_step) {
  lists_.run([&](const Lists& lists) { call_with_lists(lists, amp_step, ops::check_fused_adamw); },
             [&](const Lists& lists) { call_with_lists(lists, amp_step, ops::fused_adamw_); });
}

}  // namespace fastamp::optim
