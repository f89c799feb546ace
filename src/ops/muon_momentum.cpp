// SPDX-License-Identifier: Apache-2.0
#include "kernels/muon.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/fused_steps.h>

#include <tuple>

namespace fastamp::ops {
namespace {

struct MuonMomentum {
  using Args = MuonMomentumArgs;
  static constexpr auto kName = "muon_momentum_";
  static constexpr auto kArguments = std::tuple{FASTAMP_ARG(grads, Access::kWriteGrads),
                                                FASTAMP_ARG(momentum_buffers, Access::kWrite),
                                                FASTAMP_ARG(updates, Access::kWrite),
                                                FASTAMP_ARG(group_sizes),
                                                FASTAMP_ARG(momentum),
                                                FASTAMP_ARG(nesterov),
                                                FASTAMP_ARG(inv_scale),
                                                FASTAMP_ARG(clip_coef),
                                                FASTAMP_ARG(found_inf),
                                                FASTAMP_ARG(clip_value),
                                                FASTAMP_ARG(write_grads, Access::kRead, "True"),
                                                FASTAMP_ARG(noise_origins, Access::kRead, "[]"),
                                                FASTAMP_ARG(momentum_steps, Access::kWrite)};
  static constexpr auto kCpu = kernels::muon_momentum_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::muon_momentum;

  static auto check(const Args& args) { return check_muon_momentum(args); }
  static c10::Device device(const Args& args) { return args.updates[0].device(); }
};

FASTAMP_REGISTER_OP(MuonMomentum);

void check_update(const char* fn, const MuonMomentumArgs& args, std::size_t index) {
  const at::Tensor& update = args.updates[index];
  check_operand(fn, "updates", index, update, update, kernels::kGrad);
  TORCH_CHECK_VALUE(update.is_non_overlapping_and_dense(), fn, ": expected updates[", index,
                    "] to be dense, got strides ", update.sym_strides());
  TORCH_CHECK_VALUE(update.device() == args.updates[0].device(), fn, ": expected updates[", index,
                    "] on ", args.updates[0].device(), ", the device of updates[0], got ",
                    update.device());
  check_operand(fn, "grads", index, args.grads[index], update, kernels::kGrad);
  check_operand(fn, "momentum_buffers", index, args.momentum_buffers[index], update,
                kernels::kFirst);
}

/// The counter of the buffer at `index`.
const at::Tensor& count_of(const char* fn, const MuonMomentumArgs& args, std::size_t counted,
                           std::size_t index) {
  TORCH_CHECK_VALUE(counted < args.momentum_steps.size(), fn, ": expected more than ",
                    args.momentum_steps.size(),
                    " momentum_steps, one for each noise_origin of at least 0");
  const at::Tensor& count = args.momentum_steps[counted];
  check_operand(fn, "momentum_steps", counted, count, args.updates[index], kernels::kStep);
  return count;
}

}  // namespace

kernels::StepEntries check_muon_momentum(const MuonMomentumArgs& args) {
  constexpr auto kFunction = "muon_momentum_";
  const auto groups = args.group_sizes.size();
  check_per_group(kFunction, "momentum", args.momentum.size(), groups);
  check_per_group(kFunction, "nesterov", args.nesterov.size(), groups);
  check_groups(kernels::step_args(args));
  TORCH_CHECK_VALUE(args.momentum_buffers.size() == args.updates.size(), kFunction, ": expected ",
                    args.updates.size(), " momentum_buffers, one for each of updates, got ",
                    args.momentum_buffers.size());
  kernels::StepEntries entries;
  entries.reserve(args.updates.size());
  std::size_t index = 0;
  std::size_t counted = 0;
  for (std::size_t group = 0; group < groups; ++group) {
    for (std::int64_t n = 0; n < args.group_sizes[group]; ++n, ++index) {
      check_update(kFunction, args, index);
      const bool noisy = !args.noise_origins.empty() && args.noise_origins[index] >= 0;
      entries.add(kernels::momentum_entry(
          args, index, group, noisy ? &count_of(kFunction, args, counted++, index) : nullptr));
    }
  }
  TORCH_CHECK_VALUE(counted == args.momentum_steps.size(), kFunction, ": expected ", counted,
                    " momentum_steps, one for each noise_origin of at least 0, got ",
                    args.momentum_steps.size());
  check_amp_step(kernels::step_args(args));
  return entries;
}

void muon_momentum_(const MuonMomentumArgs& args) { call_op<MuonMomentum>(args); }

}  // namespace fastamp::ops
