// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/cuda_part.h"
#include "kernels/amp_args.h"
#include "kernels/cuda/dense_cast.h"
#include "kernels/cuda/float8.h"
#include "kernels/exponents.h"
#include "kernels/fused_steps.h"
#include "kernels/muon.h"

namespace fastamp::kernels {

/// The kernels of libfastamp_cuda.so, each a function of kernels/x.h or kernels/cuda/x.h.
struct CudaKernels {
  decltype(&unscale_and_check_cuda) unscale_and_check;
  decltype(&norm_and_check_cuda) norm_and_check;
  decltype(&update_scale_cuda) update_scale;
  decltype(&count_exponents_cuda) count_exponents;
  decltype(&fused_adamw_cuda) fused_adamw;
  decltype(&fused_sgd_cuda) fused_sgd;
  decltype(&muon_momentum_cuda) muon_momentum;
  decltype(&muon_apply_cuda) muon_apply;
  decltype(&cuda::cast_together) cast_together;
  decltype(&cuda::cast_to_float8) cast_to_float8;
  decltype(&cuda::refresh_float8_copies) refresh_float8_copies;
};

/// Null where cuda_part() is.
inline const CudaKernels* cuda_kernels() {
  const auto* const part = cuda_part();
  return part == nullptr ? nullptr : part->kernels;
}

}  // namespace fastamp::kernels
