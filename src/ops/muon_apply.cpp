// SPDX-License-Identifier: Apache-2.0
#include "kernels/muon.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/fused_steps.h>

namespace fastamp::ops {
namespace {

struct MuonApply {
  using Args = kernels::MuonApplyArgs;
  static constexpr auto kEntry = muon_apply_;
  static constexpr auto kSchema =
      "muon_apply_(Tensor(a!)[] params, Tensor[] updates, Tensor(b!)[] masters, int[] group_sizes, "
      "float[] lr, float[] ratio, float[] weight_decay, Tensor[] lr_tensors, "
      "Tensor(c!)[] weight_copies, int[] copy_of, *, Tensor? found_inf=None) -> ()";
  static constexpr auto kCpu = kernels::muon_apply_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::muon_apply;

  static auto check(const Args& args) { return check_muon_apply(args); }
  static c10::Device device(const Args& args) { return args.params[0].device(); }
};

FASTAMP_REGISTER_OP(MuonApply);

}  // namespace

kernels::StepEntries check_muon_apply(const kernels::MuonApplyArgs& args) {
  constexpr auto kFunction = "muon_apply_";
  const auto groups = args.group_sizes.size();
  check_per_group(kFunction, "ratio", args.ratio.size(), groups);
  check_per_group(kFunction, "weight_decay", args.weight_decay.size(), groups);
  return check_step(args.common(), {});
}

void muon_apply_(at::TensorList params, at::TensorList updates, at::TensorList masters,
                 at::IntArrayRef group_sizes, at::ArrayRef<double> lr, at::ArrayRef<double> ratio,
                 at::ArrayRef<double> weight_decay, at::TensorList lr_tensors,
                 at::TensorList weight_copies, at::IntArrayRef copy_of,
                 const std::optional<at::Tensor>& found_inf) {
  call_op<MuonApply>(params, updates, masters, group_sizes, lr, ratio, weight_decay, lr_tensors,
                     weight_copies, copy_of, found_inf);
}

}  // namespace fastamp::ops
