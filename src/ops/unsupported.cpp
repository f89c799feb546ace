// Where there is no kernel (sparse gradients, other devices) the call ends in one sentence about
// the argument, not in torch's list of backends.

#include "kernels/amp_checks.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

namespace fastamp::ops {
namespace {

void unscale_and_check_unsupported(at::TensorList grads, const at::Tensor& inv_scale,
                                   const at::Tensor& found_inf) {
  kernels::check_unscale_args(grads, inv_scale, found_inf);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "unscale_and_check_: expected tensors on cpu or, in a CUDA build, on cuda, got ",
      inv_scale.device());
}

void norm_and_check_unsupported(at::TensorList grads, const at::Tensor& inv_scale,
                                const at::Tensor& found_inf, const at::Tensor& sum_of_squares,
                                const std::optional<at::Tensor>& per_tensor_found_inf) {
  kernels::check_norm_args(grads, inv_scale, found_inf, sum_of_squares, per_tensor_found_inf);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "norm_and_check_: expected tensors on cpu or, in a CUDA build, on cuda, got ",
      inv_scale.device());
}

void update_scale_unsupported(const at::Tensor& scale, const at::Tensor& growth_tracker,
                              const at::Tensor& found_inf, double growth_factor,
                              double backoff_factor, int64_t growth_interval,
                              const std::optional<at::Tensor>& hysteresis_tracker,
                              int64_t hysteresis, std::optional<double> min_scale,
                              std::optional<double> max_scale) {
  kernels::check_update_scale_args(scale, growth_tracker, found_inf, growth_factor, backoff_factor,
                                   growth_interval, hysteresis_tracker, hysteresis, min_scale,
                                   max_scale);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "update_scale_: expected tensors on cpu or, in a CUDA build, on cuda, got ",
      scale.device());
}

}  // namespace
}  // namespace fastamp::ops

TORCH_LIBRARY_IMPL(fastamp, CompositeExplicitAutograd, m) {
  m.impl("unscale_and_check_", fastamp::ops::unscale_and_check_unsupported);
  m.impl("norm_and_check_", fastamp::ops::norm_and_check_unsupported);
  m.impl("update_scale_", fastamp::ops::update_scale_unsupported);
}
