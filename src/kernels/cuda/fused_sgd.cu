// SPDX-License-Identifier: Apache-2.0
// CUDA kernel of fastamp::fused_sgd_.
//
// Layout and mapping: kernels/cuda/step_kernel.cuh. Traffic per element of an fp32 parameter: 4
// bytes of gradient read and, if write_grads, written; 8 of the parameter and 8 of the momentum
// buffer. Of a 16-bit parameter: 2 of gradient, 4 of the parameter, 8 of its master or 4 of its
// remainder. Numerics: kernels/functors/sgd.h, remainder.h, noise.h, compiled without contraction:
// the CPU's bits.

#include "kernels/cuda/step_launch.cuh"
#include "kernels/fused_steps.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

namespace fastamp::kernels {
namespace {

template <StepKind kOfKind>
struct SgdOp {
  using Element = SgdUpdate;
  static constexpr int kMoments = 1;
  static constexpr int kUsualMoments = 1;
  static constexpr StepKind kKind = kOfKind;
  // 64 registers each; divisions need 80.
  static constexpr int kThreads = kOfKind == StepKind::kTurned ? 768 : 1024;

  SgdConstants groups[cuda::kLaunchGroups];

  __device__ SgdUpdate element(unsigned group, float steps) const {
    return SgdUpdate::at(groups[group], steps);
  }
  static __device__ __forceinline__ bool noisy_first(const SgdUpdate& sgd) { return sgd.noisy; }
  template <int kUsed>
  static __device__ __forceinline__ void apply(const SgdUpdate& sgd, float grad, float& weight,
                                               float* moments) {
    if (sgd.has_momentum) {
      sgd(grad, weight, moments[0]);
    } else {
      sgd(grad, weight);
    }
  }
};

}  // namespace

void fused_sgd_cuda(const ops::FusedSgdArgs& args, StepEntries entries) {
  const c10::cuda::CUDAGuard guard(args.params[0].device());
  // The op has no autograd kernel; the copies must not be recorded by autograd either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto step = std::move(entries).make_dense(args.write_grads);
  const auto groups = sgd_constants(args);
  const auto amp_step = amp_step_pointers(step_args(args));
  cuda::launch_step<SgdOp<StepKind::kPlain>>(groups, step, amp_step);
  cuda::launch_step<SgdOp<StepKind::kRemainders>>(groups, step, amp_step);
  cuda::launch_step<SgdOp<StepKind::kNoisy>>(groups, step, amp_step);
  cuda::launch_step<SgdOp<StepKind::kTurned>>(groups, step, amp_step);
  step.copy_back();
}

}  // namespace fastamp::kernels
