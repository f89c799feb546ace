// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_adamw.h"

namespace fastamp::kernels {

StepArgs FusedAdamwArgs::common() const {
  return {"fused_adamw_", params,    grads,         masters,      group_sizes, lr,
          lr_tensors,     inv_scale, clip_coef,     found_inf,    clip_value,  write_grads,
          weight_copies,  copy_of,   noise_origins, moment_scales};
}

std::vector<AdamConstants> adam_constants(const FusedAdamwArgs& args) {
  std::vector<AdamConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(args.common(), g), args.beta1[g], args.beta2[g], args.eps[g],
                      args.weight_decay[g], args.decoupled.get(g), args.amsgrad.get(g),
                      args.maximize.get(g)});
  }
  return groups;
}

}  // namespace fastamp::kernels
