#include "kernels/fused_adamw.h"

namespace fastamp::kernels {

StepArgs FusedAdamwArgs::common() const {
  return {"fused_adamw_", params,    grads,     masters,    group_sizes, lr,      lr_tensors,
          inv_scale,      clip_coef, found_inf, clip_value, write_grads, shadows, shadow_of};
}

std::vector<StepEntry> check_fused_adamw(const FusedAdamwArgs& args) {
  constexpr auto kFunction = "fused_adamw_";
  const auto groups = args.group_sizes.size();
  check_per_group(kFunction, "beta1", args.beta1.size(), groups);
  check_per_group(kFunction, "beta2", args.beta2.size(), groups);
  check_per_group(kFunction, "eps", args.eps.size(), groups);
  check_per_group(kFunction, "weight_decay", args.weight_decay.size(), groups);
  check_per_group(kFunction, "decoupled", args.decoupled.size(), groups);
  check_per_group(kFunction, "amsgrad", args.amsgrad.size(), groups);
  check_per_group(kFunction, "maximize", args.maximize.size(), groups);
  const std::vector<bool> all(groups, true);
  std::vector<bool> amsgrad(groups);
  for (std::size_t g = 0; g < groups; ++g) {
    amsgrad[g] = args.amsgrad.get(g);
  }
  return check_step(args.common(), {{kFirst, "exp_avgs", args.exp_avgs, all},
                                    {kSecond, "exp_avg_sqs", args.exp_avg_sqs, all},
                                    {kMax, "max_exp_avg_sqs", args.max_exp_avg_sqs, amsgrad},
                                    {kStep, "state_steps", args.state_steps, all}});
}

std::vector<AdamGroup> adam_groups(const FusedAdamwArgs& args) {
  std::vector<AdamGroup> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(args.common(), g), args.beta1[g], args.beta2[g], args.eps[g],
                      args.weight_decay[g], args.decoupled.get(g), args.amsgrad.get(g),
                      args.maximize.get(g)});
  }
  return groups;
}

}  // namespace fastamp::kernels
