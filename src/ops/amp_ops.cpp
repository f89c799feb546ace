// The typed entries of the scaler's ops.

#include "ops/inplace.h"

#include <fastamp/ops/amp_ops.h>

namespace fastamp::ops {

void unscale_and_check_(at::TensorList grads, const at::Tensor& inv_scale,
                        const at::Tensor& found_inf,
                        const std::optional<at::Tensor>& sum_of_squares,
                        const std::optional<at::Tensor>& non_finite_counts) {
  static const auto op = find_op<decltype(unscale_and_check_)>("fastamp::unscale_and_check_");
  op.call(grads, inv_scale, found_inf, sum_of_squares, non_finite_counts);
}

void norm_and_check_(at::TensorList grads, const at::Tensor& inv_scale, const at::Tensor& found_inf,
                     const at::Tensor& sum_of_squares,
                     const std::optional<at::Tensor>& non_finite_counts,
                     std::optional<double> max_norm, const std::optional<at::Tensor>& clip_coef,
                     const std::optional<at::Tensor>& total_norm) {
  static const auto op = find_op<decltype(norm_and_check_)>("fastamp::norm_and_check_");
  op.call(grads, inv_scale, found_inf, sum_of_squares, non_finite_counts, max_norm, clip_coef,
          total_norm);
}

void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                   int64_t growth_interval, const std::optional<at::Tensor>& hysteresis_tracker,
                   int64_t hysteresis, std::optional<double> min_scale,
                   std::optional<double> max_scale, const std::optional<at::Tensor>& inv_scale,
                   const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& history,
                   const std::optional<at::Tensor>& history_count,
                   const std::optional<at::Tensor>& new_scale) {
  static const auto op = find_op<decltype(update_scale_)>("fastamp::update_scale_");
  op.call(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval,
          hysteresis_tracker, hysteresis, min_scale, max_scale, inv_scale, norm, history,
          history_count, new_scale);
}

}  // namespace fastamp::ops
