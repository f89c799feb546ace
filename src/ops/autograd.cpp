// What the in-place ops owe to autograd: nothing to differentiate, but a version to bump.
//
// Autograd keys fall through: the ops update gradients and scaler state, never a graph. (Left to
// torch's default, each call would box 10 000 tensors to find that out.) ADInplaceOrView bumps the
// version of what was mutated, so that backward notices an edited saved tensor and caches keyed on
// versions stay right.

#include "ops/inplace.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace fastamp::ops {
namespace {

void unscale_and_check_inplace(c10::DispatchKeySet keys, at::TensorList grads,
                               const at::Tensor& inv_scale, const at::Tensor& found_inf) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastamp::unscale_and_check_", "")
                             .typed<decltype(unscale_and_check_)>();
  op.redispatch(keys & c10::after_ADInplaceOrView_keyset, grads, inv_scale, found_inf);
  bump_versions(grads);
  bump_version(found_inf);
}

void norm_and_check_inplace(c10::DispatchKeySet keys, at::TensorList grads,
                            const at::Tensor& inv_scale, const at::Tensor& found_inf,
                            const at::Tensor& sum_of_squares,
                            const std::optional<at::Tensor>& per_tensor_found_inf) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastamp::norm_and_check_", "")
                             .typed<decltype(norm_and_check_)>();
  op.redispatch(keys & c10::after_ADInplaceOrView_keyset, grads, inv_scale, found_inf,
                sum_of_squares, per_tensor_found_inf);
  bump_version(found_inf);
  bump_version(sum_of_squares);
  if (per_tensor_found_inf) {
    bump_version(*per_tensor_found_inf);
  }
}

void update_scale_inplace(c10::DispatchKeySet keys, const at::Tensor& scale,
                          const at::Tensor& growth_tracker, const at::Tensor& found_inf,
                          double growth_factor, double backoff_factor, int64_t growth_interval,
                          const std::optional<at::Tensor>& hysteresis_tracker, int64_t hysteresis,
                          std::optional<double> min_scale, std::optional<double> max_scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastamp::update_scale_", "")
                             .typed<decltype(update_scale_)>();
  op.redispatch(keys & c10::after_ADInplaceOrView_keyset, scale, growth_tracker, found_inf,
                growth_factor, backoff_factor, growth_interval, hysteresis_tracker, hysteresis,
                min_scale, max_scale);
  bump_version(scale);
  bump_version(growth_tracker);
  if (hysteresis_tracker) {
    bump_version(*hysteresis_tracker);
  }
}

}  // namespace
}  // namespace fastamp::ops

TORCH_LIBRARY_IMPL(fastamp, Autograd, m) {
  m.impl("unscale_and_check_", torch::CppFunction::makeFallthrough());
  m.impl("norm_and_check_", torch::CppFunction::makeFallthrough());
  m.impl("update_scale_", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fastamp, ADInplaceOrView, m) {
  m.impl("unscale_and_check_", fastamp::ops::unscale_and_check_inplace);
  m.impl("norm_and_check_", fastamp::ops::norm_and_check_inplace);
  m.impl("update_scale_", fastamp::ops::update_scale_inplace);
}
