// CPU kernel of fastamp::update_scale_: one scalar update, no parallelism to have.

#include "kernels/functors/update_scale.h"

#include "kernels/amp_checks.h"

#include <torch/library.h>

namespace fastamp::kernels {
namespace {

void update_scale_cpu(const at::Tensor& scale, const at::Tensor& growth_tracker,
                      const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                      int64_t growth_interval, const std::optional<at::Tensor>& hysteresis_tracker,
                      int64_t hysteresis, std::optional<double> min_scale,
                      std::optional<double> max_scale) {
  const auto rule = check_update_scale_args(scale, growth_tracker, found_inf, growth_factor,
                                            backoff_factor, growth_interval, hysteresis_tracker,
                                            hysteresis, min_scale, max_scale);
  const bool has_tracker = hysteresis_tracker.has_value() && hysteresis_tracker->defined();
  rule(*scale.mutable_data_ptr<float>(), *growth_tracker.mutable_data_ptr<int32_t>(),
       has_tracker ? hysteresis_tracker->mutable_data_ptr<int32_t>() : nullptr,
       *found_inf.const_data_ptr<float>());
}

}  // namespace
}  // namespace fastamp::kernels

TORCH_LIBRARY_IMPL(fastamp, CPU, m) { m.impl("update_scale_", fastamp::kernels::update_scale_cpu); }
