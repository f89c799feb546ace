// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_sgd.h"

#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::ops {
namespace {

struct FusedSgd {
  using Args = kernels::FusedSgdArgs;
  static constexpr auto kEntry = fused_sgd_;
  static constexpr auto kSchema =
      "fused_sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, "
      "Tensor(d!)[] momentum_steps, Tensor(e!)[] masters, int[] group_sizes, float[] lr, "
      "float[] momentum, float[] dampening, float[] weight_decay, bool[] nesterov, "
      "bool[] maximize, Tensor[] lr_tensors, Tensor(f!)[] weight_copies, int[] copy_of, *, "
      "Tensor? inv_scale=None, Tensor? clip_coef=None, Tensor? found_inf=None, "
      "float? clip_value=None, bool write_grads=True, int[] noise_origins=[]) -> ()";
  static constexpr auto kCpu = kernels::fused_sgd_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::fused_sgd;

  static auto check(const Args& args) { return check_fused_sgd(args); }
  static c10::Device device(const Args& args) { return args.params[0].device(); }
  static bool only_reads(const Args& args, std::size_t argument) {
    return argument == kernels::kGradsArgument && !args.write_grads;
  }
};

FASTAMP_REGISTER_OP(FusedSgd);

}  // namespace

kernels::StepEntries check_fused_sgd(const kernels::FusedSgdArgs& args) {
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
  return check_step(args.common(),
                    {{kernels::kFirst, "momentum_buffers", args.momentum_buffers, used},
                     {kernels::kStep, "momentum_steps", args.momentum_steps, used}});
}

void fused_sgd_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                at::TensorList momentum_steps, at::TensorList masters, at::IntArrayRef group_sizes,
                at::ArrayRef<double> lr, at::ArrayRef<double> momentum,
                at::ArrayRef<double> dampening, at::ArrayRef<double> weight_decay,
                const c10::List<bool>& nesterov, const c10::List<bool>& maximize,
                at::TensorList lr_tensors, at::TensorList weight_copies, at::IntArrayRef copy_of,
                const std::optional<at::Tensor>& inv_scale,
                const std::optional<at::Tensor>& clip_coef,
                const std::optional<at::Tensor>& found_inf, std::optional<double> clip_value,
                bool write_grads, at::IntArrayRef noise_origins) {
  call_op<FusedSgd>(params, grads, momentum_buffers, momentum_steps, masters, group_sizes, lr,
                    momentum, dampening, weight_decay, nesterov, maximize, lr_tensors,
                    weight_copies, copy_of, inv_scale, clip_coef, found_inf, clip_value,
                    write_grads, noise_origins);
}

}  // namespace fastamp::ops
