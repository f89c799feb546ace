// SPDX-License-Identifier: Apache-2.0
// CUDA kernel of fastamp::update_scale_.
//
// One thread, a dozen scalars: the scale stays on the device, so that no step waits for the host.
// Traffic: 64 bytes, with fast growth 72. Numerics: kernels/functors/update_scale.h (products in
// fp64).

#include "kernels/amp_args.h"
#include "kernels/cuda/launch.cuh"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace fastamp::kernels {
namespace {

__global__ void update_scale_kernel(ScaleUpdate update) { update(); }

}  // namespace

void update_scale_cuda(const UpdateScaleArgs& args) {
  const c10::cuda::CUDAGuard guard(args.scale.device());
  cuda::launch(update_scale_kernel, 1, 1, at::cuda::getCurrentCUDAStream(), scale_update(args));
}

}  // namespace fastamp::kernels
