// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_adamw.h"

namespace fastamp::kernels {

StepArgs step_args(const ops::FusedAdamwArgs& args) {
  return {.fn = "fused_adamw_",
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
          .noise_origins = args.noise_origins,
          .moment_scales = args.moment_scales};
}

std::vector<AdamConstants> adam_constants(const ops::FusedAdamwArgs& args) {
  const auto common = step_args(args);
  std::vector<AdamConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(common, g), args.beta1[g], args.beta2[g], args.eps[g],
                      args.weight_decay[g], args.decoupled.get(g), args.amsgrad.get(g),
                      args.maximize.get(g)});
  }
  return groups;
}

}  // namespace fastamp::kernels
