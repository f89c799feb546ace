// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_adamw.h"

#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::ops {
namespace {

struct FusedAdamw {
  using Args = kernels::FusedAdamwArgs;
  static constexpr auto kEntry = fused_adamw_;
  static constexpr auto kSchema =
      "fused_adamw_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps, "
      "Tensor(g!)[] masters, int[] group_sizes, float[] lr, float[] beta1, float[] beta2, "
      "float[] eps, float[] weight_decay, bool[] decoupled, bool[] amsgrad, bool[] maximize, "
      "Tensor[] lr_tensors, Tensor(h!)[] weight_copies, int[] copy_of, *, Tensor? inv_scale=None, "
      "Tensor? clip_coef=None, Tensor? found_inf=None, float? clip_value=None, "
      "bool write_grads=True, int[] noise_origins=[], Tensor(i!)[] moment_scales) -> ()";
  static constexpr auto kCpu = kernels::fused_adamw_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::fused_adamw;

  static auto check(const Args& args) { return check_fused_adamw(args); }
  static c10::Device device(const Args& args) { return args.params[0].device(); }
  static bool only_reads(const Args& args, std::size_t argument) {
    return argument == kernels::kGradsArgument && !args.write_grads;
  }
};

FASTAMP_REGISTER_OP(FusedAdamw);

}  // namespace

kernels::StepEntries check_fused_adamw(const kernels::FusedAdamwArgs& args) {
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
  return check_step(args.common(),
                    {{kernels::kFirst, "exp_avgs", args.exp_avgs, all, true},
                     {kernels::kSecond, "exp_avg_sqs", args.exp_avg_sqs, all, true},
                     {kernels::kMax, "max_exp_avg_sqs", args.max_exp_avg_sqs, amsgrad},
                     {kernels::kStep, "state_steps", args.state_steps, all}});
}

void fused_adamw_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                  at::TensorList state_steps, at::TensorList masters, at::IntArrayRef group_sizes,
                  at::ArrayRef<double> lr, at::ArrayRef<double> beta1, at::ArrayRef<double> beta2,
                  at::ArrayRef<double> eps, at::ArrayRef<double> weight_decay,
                  const c10::List<bool>& decoupled, const c10::List<bool>& amsgrad,
                  const c10::List<bool>& maximize, at::TensorList lr_tensors,
                  at::TensorList weight_copies, at::IntArrayRef copy_of,
                  const std::optional<at::Tensor>& inv_scale,
                  const std::optional<at::Tensor>& clip_coef,
                  const std::optional<at::Tensor>& found_inf, std::optional<double> clip_value,
                  bool write_grads, at::IntArrayRef noise_origins, at::TensorList moment_scales) {
  call_op<FusedAdamw>(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, masters,
                      group_sizes, lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad,
                      maximize, lr_tensors, weight_copies, copy_of, inv_scale, clip_coef, found_inf,
                      clip_value, write_grads, noise_origins, moment_scales);
}

}  // namespace fastamp::ops
