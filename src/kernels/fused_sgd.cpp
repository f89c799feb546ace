#include "kernels/fused_sgd.h"

namespace fastamp::kernels {

StepArgs FusedSgdArgs::common() const {
  return {"fused_sgd_", params,    grads,     masters,    group_sizes, lr,      lr_tensors,
          inv_scale,    clip_coef, found_inf, clip_value, write_grads, shadows, shadow_of};
}

std::vector<StepEntry> check_fused_sgd(const FusedSgdArgs& args) {
  constexpr auto kFunction = "fused_sgd_";
  const auto groups = args.group_sizes.size();
  check_per_group(kFunction, "momentum", args.momentum.size(), groups);
  check_per_group(kFunction, "dampening", args.dampening.size(), groups);
  check_per_group(kFunction, "weight_decay", args.weight_decay.size(), groups);
  check_per_group(kFunction, "nesterov", args.nesterov.size(), groups);
  check_per_group(kFunction, "maximize", args.maximize.size(), groups);
  std::vector<bool> used(groups);
  for (std::size_t g = 0; g < groups; ++g) {
    used[g] = args.momentum[g] != 0.0;
  }
  return check_step(args.common(), {{kFirst, "momentum_buffers", args.momentum_buffers, used},
                                    {kStep, "momentum_steps", args.momentum_steps, used}});
}

std::vector<SgdGroup> sgd_groups(const FusedSgdArgs& args) {
  std::vector<SgdGroup> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(args.common(), g), args.momentum[g], args.dampening[g],
                      args.weight_decay[g], args.nesterov.get(g), args.maximize.get(g)});
  }
  return groups;
}

}  // namespace fastamp::kernels
