// SPDX-License-Identifier: Apache-2.0
#include "kernels/muon.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/fused_steps.h>

#include <tuple>

namespace fastamp::ops {
namespace {

struct MuonApply {
  using Args = MuonApplyArgs;
  static constexpr auto kName = "muon_apply_";
  static constexpr auto kArguments = std::tuple{FASTAMP_ARG(params, Access::kWrite),
                                                FASTAMP_ARG(updates),
                                                FASTAMP_ARG(masters, Access::kWrite),
                                                FASTAMP_ARG(group_sizes),
                                                FASTAMP_ARG(lr),
                                                FASTAMP_ARG(ratio),
                                                FASTAMP_ARG(weight_decay),
                                                FASTAMP_ARG(lr_tensors),
                                                FASTAMP_ARG(weight_copies, Access::kWrite),
                                                FASTAMP_ARG(copy_of),
                                                FASTAMP_ARG(found_inf)};
  static constexpr auto kCpu = kernels::muon_apply_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::muon_apply;

  static auto check(const Args& args) { return check_muon_apply(args); }
  static c10::Device device(const Args& args) { return args.params[0].device(); }
};

FASTAMP_REGISTER_OP(MuonApply);

}  // namespace

kernels::StepEntries check_muon_apply(const MuonApplyArgs& args) {
  constexpr auto kFunction = "muon_apply_";
  const auto groups = args.group_sizes.size();
  check_per_group(kFunction, "ratio", args.ratio.size(), groups);
  check_per_group(kFunction, "weight_decay", args.weight_decay.size(), groups);
  return check_step(kernels::step_args(args), {});
}

void muon_apply_(const MuonApplyArgs& args) { call_op<MuonApply>(args); }

}  // namespace fastamp::ops
