// SPDX-License-Identifier: Apache-2.0
#include "optim/adam_step.h"

#include "ops/checks.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::optim {
namespace {

template <typename Lists, typename Call>
void call_with_adam_lists(const Lists& lists, const StepGate& gate, const Call& call) {
  const auto here = gate_on(gate, lists.device);
  const auto rates = lists.learning_rates();
  call(lists.params.list(), lists.grads, lists.exp_avgs.list(), lists.exp_avg_sqs.list(),
       lists.max_exp_avg_sqs.list(), lists.steps.list(), lists.masters.list(), lists.group_sizes,
       lists.lr, lists.beta1, lists.beta2, lists.eps, lists.weight_decay, lists.decoupled,
       lists.amsgrad, lists.maximize, rates, lists.weight_copies, lists.copy_of, here.inv_scale,
       here.clip_coef, here.found_inf, here.clip_value, here.write_grads, lists.noise_origins,
       lists.moment_scales.list());
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

void AdamStep::run(const StepGate& gate) {
  lists_.run(
      [&](const Lists& lists) {
        call_with_adam_lists(lists, gate, [](const auto&... args) {
          ops::check_fused_adamw(kernels::FusedAdamwArgs{args...});
        });
      },
      [&](const Lists& lists) { call_with_adam_lists(lists, gate, ops::fused_adamw_); });
}

}  // namespace fastamp::optim
