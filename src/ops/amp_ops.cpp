#include <fastamp/ops/amp_ops.h>

#include <ATen/core/dispatch/Dispatcher.h>

namespace fastamp::ops {

// The handles are looked up once: a lookup by name costs a lock and a hash, a cached call does not.

void unscale_and_check_(at::TensorList grads, const at::Tensor& inv_scale,
                        const at::Tensor& found_inf) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastamp::unscale_and_check_", "")
                             .typed<decltype(unscale_and_check_)>();
  op.call(grads, inv_scale, found_inf);
}

void norm_and_check_(at::TensorList grads, const at::Tensor& inv_scale, const at::Tensor& found_inf,
                     const at::Tensor& sum_of_squares,
                     const std::optional<at::Tensor>& per_tensor_found_inf) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastamp::norm_and_check_", "")
                             .typed<decltype(norm_and_check_)>();
  op.call(grads, inv_scale, found_inf, sum_of_squares, per_tensor_found_inf);
}

void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                   int64_t growth_interval, const std::optional<at::Tensor>& hysteresis_tracker,
                   int64_t hysteresis, std::optional<double> min_scale,
                   std::optional<double> max_scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastamp::update_scale_", "")
                             .typed<decltype(update_scale_)>();
  op.call(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval,
          hysteresis_tracker, hysteresis, min_scale, max_scale);
}

}  // namespace fastamp::ops
