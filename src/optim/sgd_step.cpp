// SPDX-License-Identifier: Apache-2.0
#include "optim/sgd_step.h"

#include "ops/checks.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::optim {
namespace {

template <typename Lists, typename Call>
void call_with_sgd_lists(const Lists& lists, const StepGate& gate, const Call& call) {
  const auto here = gate_on(gate, lists.device);
  const auto rates = lists.learning_rates();
  call(lists.params.list(), lists.grads, lists.momentum_buffers.list(), lists.momentum_steps.list(),
       lists.masters.list(), lists.group_sizes, lists.lr, lists.momentum, lists.dampening,
       lists.weight_decay, lists.nesterov, lists.maximize, rates, lists.weight_copies,
       lists.copy_of, here.inv_scale, here.clip_coef, here.found_inf, here.clip_value,
       here.write_grads, lists.noise_origins);
}

}  // namespace

void SgdStep::Lists::add_group(const SgdGroup& group) {
  momentum.push_back(group.momentum);
  dampening.push_back(group.dampening);
  weight_decay.push_back(group.weight_decay);
  nesterov.push_back(group.nesterov);
  maximize.push_back(group.maximize);
}

void SgdStep::run(const StepGate& gate) {
  lists_.run(
      [&](const Lists& lists) {
        call_with_sgd_lists(lists, gate, [](const auto&... args) {
          ops::check_fused_sgd(kernels::FusedSgdArgs{args...});
        });
      },
      [&](const Lists& lists) { call_with_sgd_lists(lists, gate, ops::fused_sgd_); });
}

}  // namespace fastamp::optim
