// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_sgd.h"

namespace fastamp::kernels {

StepArgs step_args(const ops::FusedSgdArgs& args) {
  return {.fn = "fused_sgd_",
          .params = args.params,
          .grads = args.grads,
          .masters = args.masters,
          .group_sizes = args.group_sizes,
          .lr = args.lr,
          .lr_tensors = args.lr_tensors,
          .inv_scale = args.inv_scale,
          .clip_coef = args.clip_coef,
          .found_inf = args.found_inf,
          .clip_value = args.clip_value,
          .write_grads = args.write_grads,
          .weight_copies = args.weight_copies,
          .copy_of = args.copy_of,
          .noise_origins = args.noise_origins};
}

std::vector<SgdConstants> sgd_constants(const ops::FusedSgdArgs& args) {
  const auto common = step_args(args);
  std::vector<SgdConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(common, g), args.momentum[g], args.dampening[g],
                      args.weight_decay[g], args.nesterov.get(g), args.maximize.get(g)});
  }
  return groups;
}

}  // namespace fastamp::kernels
