// SPDX-License-Identifier: Apache-2.0
// CUDA side of fastamp::norm_and_check_: the pass of kernels/cuda/squares.cuh without its writes.

#include "kernels/amp_args.h"
#include "kernels/cuda/squares_launch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAGuard.h>

namespace fastamp::kernels {

void norm_and_check_cuda(const NormArgs& args) {
  const c10::cuda::CUDAGuard guard(args.inv_scale.device());
  // The op has no autograd kernel; the copies of strided gradients must not be recorded either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  cuda::sum_squares(
      cuda::gather_grads(args.grads, /*writes=*/false),
      {args.inv_scale.const_data_ptr<float>(), args.found_inf.mutable_data_ptr<float>(),
       mutable_pointer<std::int64_t>(args.non_finite_counts), norm_results(args),
       args.overwrite_found_inf});
}

}  // namespace fastamp::kernels
