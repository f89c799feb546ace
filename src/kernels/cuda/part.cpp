// SPDX-License-Identifier: Apache-2.0
// The one function that libfastamp_cuda.so exports; core/cuda_part.cpp looks it up.

#include "core/cuda_part.h"
#include "kernels/cuda/devices.h"
#include "kernels/cuda_kernels.h"

namespace fastamp::kernels {
namespace {

constexpr CudaKernels kKernels{
    .unscale_and_check = unscale_and_check_cuda,
    .norm_and_check = norm_and_check_cuda,
    .update_scale = update_scale_cuda,
    .count_exponents = count_exponents_cuda,
    .fused_adamw = fused_adamw_cuda,
    .fused_sgd = fused_sgd_cuda,
    .muon_momentum = muon_momentum_cuda,
    .muon_apply = muon_apply_cuda,
    .cast_together = cuda::cast_together,
    .cast_to_float8 = cuda::cast_to_float8,
    .refresh_float8_copies = cuda::refresh_float8_copies,
};

}  // namespace
}  // namespace fastamp::kernels

extern "C" FASTAMP_API const fastamp::CudaPart* fastamp_cuda_part() {
  static const fastamp::CudaPart part{.build = fastamp::kCudaPartBuild,
                                      .devices = fastamp::kernels::cuda::devices(),
                                      .kernels = &fastamp::kernels::kKernels};
  return &part;
}
