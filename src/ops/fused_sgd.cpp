// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_steps.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/fused_steps.h>

#include <tuple>

namespace fastamp::ops {
namespace {

struct FusedSgd {
  using Args = FusedSgdArgs;
  static constexpr auto kName = "fused_sgd_";
  static constexpr auto kArguments = std::tuple{FASTAMP_ARG(params, Access::kWrite),
                                                FASTAMP_ARG(grads, Access::kWriteGrads),
                                                FASTAMP_ARG(momentum_buffers, Access::kWrite),
                                                FASTAMP_ARG(momentum_steps, Access::kWrite),
                                                FASTAMP_ARG(masters, Access::kWrite),
                                                FASTAMP_ARG(group_sizes),
                                                FASTAMP_ARG(lr),
                                                FASTAMP_ARG(momentum),
                                                FASTAMP_ARG(dampening),
                                                FASTAMP_ARG(weight_decay),
                                                FASTAMP_ARG(nesterov),
                                                FASTAMP_ARG(maximize),
                                                FASTAMP_ARG(lr_tensors),
                                                FASTAMP_ARG(weight_copies, Access::kWrite),
                                                FASTAMP_ARG(copy_of),
                                                FASTAMP_ARG(inv_scale),
                                                FASTAMP_ARG(clip_coef),
                                                FASTAMP_ARG(found_inf),
                                                FASTAMP_ARG(clip_value),
                                                FASTAMP_ARG(write_grads, Access::kRead, "True"),
                                                FASTAMP_ARG(noise_origins, Access::kRead, "[]")};
  static constexpr auto kCpu = kernels::fused_sgd_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::fused_sgd;

  static auto check(const Args& args) { return check_fused_sgd(args); }
  static c10::Device device(const Args& args) { return args.params[0].device(); }
};

FASTAMP_REGISTER_OP(FusedSgd);

}  // namespace

kernels::StepEntries check_fused_sgd(const FusedSgdArgs& args) {
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
  return check_step(kernels::step_args(args),
                    {{kernels::kFirst, "momentum_buffers", args.momentum_buffers, used},
                     {kernels::kStep, "momentum_steps", args.momentum_steps, used}});
}

void fused_sgd_(const FusedSgdArgs& args) { call_op<FusedSgd>(args); }

}  // namespace fastamp::ops
