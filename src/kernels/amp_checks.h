#pragma once

#include "kernels/functors/update_scale.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fastamp::kernels {

/// Throws unless `t` is strided, has one element of `dtype` and is on `device`, that of
/// `device_of`.
void check_single(const char* fn, const char* name, const at::Tensor& t, at::ScalarType dtype,
                  c10::Device device, const char* device_of);

/// Throws what fastamp/ops/amp_ops.h promises for unscale_and_check_; reads no tensor data.
void check_unscale_args(at::TensorList grads, const at::Tensor& inv_scale,
                        const at::Tensor& found_inf);

/// The same for norm_and_check_.
void check_norm_args(at::TensorList grads, const at::Tensor& inv_scale, const at::Tensor& found_inf,
                     const at::Tensor& sum_of_squares,
                     const std::optional<at::Tensor>& per_tensor_found_inf);

/// The same for update_scale_. Returns the rule to apply.
UpdateScale check_update_scale_args(const at::Tensor& scale, const at::Tensor& growth_tracker,
                                    const at::Tensor& found_inf, double growth_factor,
                                    double backoff_factor, int64_t growth_interval,
                                    const std::optional<at::Tensor>& hysteresis_tracker,
                                    int64_t hysteresis, std::optional<double> min_scale,
                                    std::optional<double> max_scale);

}  // namespace fastamp::kernels
