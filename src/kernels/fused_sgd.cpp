// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_sgd.h"

namespace fastamp::kernels {

StepArgs FusedSgdArgs::common() const {
  return {"fused_sgd_", params,      grads,         masters,   group_sizes,
          lr,           lr_tensors,  inv_scale,     clip_coef, found_inf,
          clip_value,   write_grads, weight_copies, copy_of,   noise_origins};
}

std::vector<SgdConstants> sgd_constants(const FusedSgdArgs& args) {
  std::vector<SgdConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(args.common(), g), args.momentum[g], args.dampening[g],
                      args.weight_decay[g], args.nesterov.get(g), args.maximize.get(g)});
  }
  return groups;
}

}  // namespace fastamp::kernels
