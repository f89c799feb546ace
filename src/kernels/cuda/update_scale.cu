// CUDA kernel of fastamp::update_scale_.
//
// One thread, five scalars: the scale stays on the device, so that no step waits for the host.
// Traffic: 20 bytes. Numerics: kernels/functors/update_scale.h (products in fp64).

#include "kernels/amp_checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/functors/update_scale.h"

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace fastamp::kernels {
namespace {

__global__ void update_scale_kernel(UpdateScale rule, float* scale, std::int32_t* growth_tracker,
                                    std::int32_t* hysteresis_tracker, const float* found_inf) {
  rule(*scale, *growth_tracker, hysteresis_tracker, *found_inf);
}

void update_scale_cuda(const at::Tensor& scale, const at::Tensor& growth_tracker,
                       const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                       int64_t growth_interval, const std::optional<at::Tensor>& hysteresis_tracker,
                       int64_t hysteresis, std::optional<double> min_scale,
                       std::optional<double> max_scale) {
  const auto rule = check_update_scale_args(scale, growth_tracker, found_inf, growth_factor,
                                            backoff_factor, growth_interval, hysteresis_tracker,
                                            hysteresis, min_scale, max_scale);
  const c10::cuda::CUDAGuard guard(scale.device());
  const bool has_tracker = hysteresis_tracker.has_value() && hysteresis_tracker->defined();
  cuda::launch(update_scale_kernel, 1, 1, at::cuda::getCurrentCUDAStream(), rule,
               scale.mutable_data_ptr<float>(), growth_tracker.mutable_data_ptr<std::int32_t>(),
               has_tracker ? hysteresis_tracker->mutable_data_ptr<std::int32_t>() : nullptr,
               found_inf.const_data_ptr<float>());
}

}  // namespace
}  // namespace fastamp::kernels

TORCH_LIBRARY_IMPL(fastamp, CUDA, m) {
  m.impl("update_scale_", fastamp::kernels::update_scale_cuda);
}
