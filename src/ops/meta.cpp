// Meta kernels: the checks of the real ones, no data. Fake tensors and torch.compile call these.

#include "kernels/amp_checks.h"

#include <torch/library.h>

namespace fastamp::ops {
namespace {

void update_scale_meta(const at::Tensor& scale, const at::Tensor& growth_tracker,
                       const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                       int64_t growth_interval, const std::optional<at::Tensor>& hysteresis_tracker,
                       int64_t hysteresis, std::optional<double> min_scale,
                       std::optional<double> max_scale) {
  kernels::check_update_scale_args(scale, growth_tracker, found_inf, growth_factor, backoff_factor,
                                   growth_interval, hysteresis_tracker, hysteresis, min_scale,
                                   max_scale);
}

}  // namespace
}  // namespace fastamp::ops

TORCH_LIBRARY_IMPL(fastamp, Meta, m) {
  m.impl("unscale_and_check_", fastamp::kernels::check_unscale_args);
  m.impl("norm_and_check_", fastamp::kernels::check_norm_args);
  m.impl("update_scale_", fastamp::ops::update_scale_meta);
}
