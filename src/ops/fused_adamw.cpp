// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_steps.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/fused_steps.h>

#include <tuple>

namespace fastamp::ops {
namespace {

struct FusedAdamw {
  using Args = FusedAdamwArgs;
  static constexpr auto kName = "fused_adamw_";
  static constexpr auto kArguments = std::tuple{FASTAMP_ARG(params, Access::kWrite),
                                                FASTAMP_ARG(grads, Access::kWriteGrads),
                                                FASTAMP_ARG(exp_avgs, Access::kWrite),
                                                FASTAMP_ARG(exp_avg_sqs, Access::kWrite),
                                                FASTAMP_ARG(max_exp_avg_sqs, Access::kWrite),
                                                FASTAMP_ARG(state_steps, Access::kWrite),
                                                FASTAMP_ARG(masters, Access::kWrite),
                                                FASTAMP_ARG(group_sizes),
                                                FASTAMP_ARG(lr),
                                                FASTAMP_ARG(beta1),
                                                FASTAMP_ARG(beta2),
                                                FASTAMP_ARG(eps),
                                                FASTAMP_ARG(weight_decay),
                                                FASTAMP_ARG(decoupled),
                                                FASTAMP_ARG(amsgrad),
                                                FASTAMP_ARG(maximize),
                                                FASTAMP_ARG(lr_tensors),
                                                FASTAMP_ARG(weight_copies, Access::kWrite),
                                                FASTAMP_ARG(copy_of),
                                                FASTAMP_ARG(inv_scale),
                                                FASTAMP_ARG(clip_coef),
                                                FASTAMP_ARG(found_inf),
                                                FASTAMP_ARG(clip_value),
                                                FASTAMP_ARG(write_grads, Access::kRead, "True"),
                                                FASTAMP_ARG(noise_origins, Access::kRead, "[]"),
                                                FASTAMP_ARG(moment_scales, Access::kWrite)};
  static constexpr auto kCpu = kernels::fused_adamw_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::fused_adamw;

  static auto check(const Args& args) { return check_fused_adamw(args); }
  static c10::Device device(const Args& args) { return args.params[0].device(); }
};

FASTAMP_REGISTER_OP(FusedAdamw);

}  // namespace

kernels::StepEntries check_fused_adamw(const FusedAdamwArgs& args) {
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
  return check_step(kernels::step_args(args),
                    {{kernels::kFirst, "exp_avgs", args.exp_avgs, all, true},
                     {kernels::kSecond, "exp_avg_sqs", args.exp_avg_sqs, all, true},
                     {kernels::kMax, "max_exp_avg_sqs", args.max_exp_avg_sqs, amsgrad},
                     {kernels::kStep, "state_steps", args.state_steps, all}});
}

void fused_adamw_(const FusedAdamwArgs& args) { call_op<FusedAdamw>(args); }

}  // namespace fastamp::ops
