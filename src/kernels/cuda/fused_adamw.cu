// SPDX-License-Identifier: Apache-2.0
// CUDA kernel of fastamp::fused_adamw_.
//
// Layout and mapping: kernels/cuda/step_kernel.cuh. Traffic per element of an fp32 parameter: 4
// bytes of gradient read and, if write_grads, written; 8 of the parameter and 16 of the moments (24
// with amsgrad, half with bf16 moments, 4 with those in 8 bits). Of a 16-bit parameter: 2 of
// gradient, 4 of the parameter, 8 of its master or 4 of its remainder. Numerics:
// kernels/functors/adam.h, in torch's order on CUDA and compiled without contraction: the bits of
// torch's foreach kernels. Their powers in fp64 come from the host; those computed here may differ
// in their last bits. bf16 moments, remainders and moments in 8 bits: kernels/functors/noise.h,
// remainder.h and moment_codes.h, the CPU's bits.

#include "kernels/cuda/step_launch.cuh"
#include "kernels/fused_steps.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

namespace fastamp::kernels {
namespace {

template <StepKind kOfKind>
struct AdamOp {
  using Element = AdamUpdate;
  static constexpr int kMoments = 3;
  static constexpr int kUsualMoments = 2;  // the third is amsgrad's
  static constexpr StepKind kKind = kOfKind;
  // 80 registers each, 48 KiB in flight per processor; codes need 96, noise and divisions more.
  static constexpr int kThreads = kOfKind == StepKind::kTurned || kOfKind == StepKind::kNoisy ? 512
                                  : kOfKind == StepKind::kCodes                               ? 640
                                                                                              : 768;

  AdamConstants groups[cuda::kLaunchGroups];

  __device__ AdamUpdate element(unsigned group, float steps) const {
    return AdamUpdate::at(groups[group], steps);
  }
  static __device__ __forceinline__ bool noisy_first(const AdamUpdate& adam) {
    return adam.noisy_first();
  }
  template <int kUsed>
  static __device__ __forceinline__ void apply(const AdamUpdate& adam, float grad, float& weight,
                                               float* moments) {
    AdamModes modes = adam.modes;
    modes.amsgrad = modes.amsgrad && kUsed == kMoments;
    adam.step<kDeviceOrder>(modes, grad, weight, moments[0], moments[1], moments[kUsed - 1]);
  }
};

}  // namespace

void fused_adamw_cuda(const ops::FusedAdamwArgs& args, StepEntries entries) {
  const c10::cuda::CUDAGuard guard(args.params[0].device());
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(args.write_grads);
  const auto groups = adam_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  cuda::launch_step<AdamOp<StepKind::kPlain>>(groups, step, amp_step);
  cuda::launch_step<AdamOp<StepKind::kRemainders>>(groups, step, amp_step);
  cuda::launch_step<AdamOp<StepKind::kNoisy>>(groups, step, amp_step);
  cuda::launch_step<AdamOp<StepKind::kTurned>>(groups, step, amp_step);
  cuda::launch_step<AdamOp<StepKind::kCodes>>(groups, step, amp_step);
  step.copy_back();
}

}  // namespace fastamp::kernels
