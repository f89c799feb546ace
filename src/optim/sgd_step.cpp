// SPDX-License-Identifier: Apache-2.0
#include "optim/sgd_step.h"

#include "ops/checks.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::optim {
namespace {

template <typename Lists, typename Call>
void call_with_lists(const Lists& lists, const AmpStep& amp_step, const Call& call) {
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

}  // namespace

void SgdStep::Lists::add_group(const SgdGroup& group) {
  momentum.push_back(group.momentum);
  dampening.push_back(group.dampening);
  weight_decay.push_back(group.weight_decay);
  nesterov.push_back(group.nesterov);
  maximize.push_back(group.maximize);
}

void SgdStep::run(const AmpStep& amp_step) {
  lists_.run([&](const Lists& lists) { call_with_lists(lists, amp_step, ops::check_fused_sgd); },
             [&](const Lists& lists) { call_with_lists(lists, amp_step, ops::fused_sgd_); });
}

}  // namespace fastamp::optim
