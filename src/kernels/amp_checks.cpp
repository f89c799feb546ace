#include "kernels/amp_checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

namespace fastamp::kernels {
namespace {

bool is_gradient_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

/// The slow half of the gradient check: says what is wrong with grads[index], if anything is.
void check_gradient(const at::Tensor& t, size_t index, c10::Device device) {
  constexpr auto kFunction = "unscale_and_check_: expected grads[";
  TORCH_CHECK_VALUE(t.defined(), kFunction, index, "] to be a tensor, got None");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, kFunction, index, "] to be strided, got layout ",
                    t.layout());
  TORCH_CHECK_TYPE(is_gradient_dtype(t.scalar_type()), kFunction, index,
                   "] to be Half, BFloat16, Float or Double, got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.device() == device, kFunction, index, "] on ", device,
                    ", the device of inv_scale, got ", t.device());
  TORCH_CHECK_VALUE(at::has_internal_overlap(t) != at::MemOverlap::Yes, kFunction, index,
                    "] to have one memory location per element, got an expanded tensor of shape ",
                    t.sizes(), " and strides ", t.strides());
}

float bound(const char* name, std::optional<double> value) {
  if (!value) {
    return 0.0F;
  }
  TORCH_CHECK_VALUE(!std::isnan(*value), "update_scale_: expected ", name,
                    " to be a number, got NaN");
  return static_cast<float>(*value);
}

/// What is wrong with grads[index] of norm_and_check_, if anything is.
void check_read_gradient(const at::Tensor& t, size_t index, c10::Device device) {
  constexpr auto kFunction = "norm_and_check_: expected grads[";
  TORCH_CHECK_VALUE(t.defined(), kFunction, index, "] to be a tensor, got None");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, kFunction, index, "] to be strided, got layout ",
                    t.layout());
  TORCH_CHECK_TYPE(is_gradient_dtype(t.scalar_type()) && t.scalar_type() != at::kDouble, kFunction,
                   index, "] to be Half, BFloat16 or Float, got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.device() == device, kFunction, index, "] on ", device,
                    ", the device of inv_scale, got ", t.device());
}

}  // namespace

void check_single(const char* fn, const char* name, const at::Tensor& t, at::ScalarType dtype,
                  c10::Device device, const char* device_of) {
  TORCH_CHECK_VALUE(t.defined(), fn, ": expected ", name, " to be a tensor, got None");
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, fn, ": expected ", name, " to be ",
                   c10::toString(dtype), ", got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, fn, ": expected ", name,
                    " to be strided, got layout ", t.layout());
  TORCH_CHECK_VALUE(t.numel() == 1, fn, ": expected ", name, " to have one element, got ",
                    t.numel());
  TORCH_CHECK_VALUE(t.device() == device, fn, ": expected ", name, " on ", device,
                    ", the device of ", device_of, ", got ", t.device());
}

void check_unscale_args(at::TensorList grads, const at::Tensor& inv_scale,
                        const at::Tensor& found_inf) {
  constexpr auto kFunction = "unscale_and_check_";
  TORCH_CHECK_VALUE(inv_scale.defined(), kFunction,
                    ": expected inv_scale to be a tensor, got None");
  const auto device = inv_scale.device();
  check_single(kFunction, "inv_scale", inv_scale, at::kFloat, device, "inv_scale");
  check_single(kFunction, "found_inf", found_inf, at::kFloat, device, "inv_scale");
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& t = grads[i];
    // Dense gradients of a good dtype are nearly all there are: five loads and no call for them.
    if (C10_LIKELY(t.defined() && t.device() == device && t.layout() == at::kStrided &&
                   is_gradient_dtype(t.scalar_type()) && t.is_non_overlapping_and_dense())) {
      continue;
    }
    check_gradient(t, i, device);
  }
}

void check_norm_args(at::TensorList grads, const at::Tensor& inv_scale, const at::Tensor& found_inf,
                     const at::Tensor& sum_of_squares,
                     const std::optional<at::Tensor>& per_tensor_found_inf) {
  constexpr auto kFunction = "norm_and_check_";
  TORCH_CHECK_VALUE(inv_scale.defined(), kFunction,
                    ": expected inv_scale to be a tensor, got None");
  const auto device = inv_scale.device();
  check_single(kFunction, "inv_scale", inv_scale, at::kFloat, device, "inv_scale");
  check_single(kFunction, "found_inf", found_inf, at::kFloat, device, "inv_scale");
  check_single(kFunction, "sum_of_squares", sum_of_squares, at::kDouble, device, "inv_scale");
  for (size_t i = 0; i < grads.size(); ++i) {
    check_read_gradient(grads[i], i, device);
  }
  if (!per_tensor_found_inf || !per_tensor_found_inf->defined()) {
    return;
  }
  const at::Tensor& flags = *per_tensor_found_inf;
  TORCH_CHECK_TYPE(flags.scalar_type() == at::kFloat, kFunction,
                   ": expected per_tensor_found_inf to be Float, got ", flags.scalar_type());
  TORCH_CHECK_VALUE(flags.device() == device, kFunction, ": expected per_tensor_found_inf on ",
                    device, ", the device of inv_scale, got ", flags.device());
  TORCH_CHECK_VALUE(flags.layout() == at::kStrided && flags.is_contiguous() && flags.dim() == 1 &&
                        flags.sym_numel() == static_cast<std::int64_t>(grads.size()),
                    kFunction, ": expected per_tensor_found_inf to be contiguous of shape [",
                    grads.size(), "], an element for each of grads, got shape ", flags.sym_sizes());
}

UpdateScale check_update_scale_args(const at::Tensor& scale, const at::Tensor& growth_tracker,
                                    const at::Tensor& found_inf, double growth_factor,
                                    double backoff_factor, int64_t growth_interval,
                                    const std::optional<at::Tensor>& hysteresis_tracker,
                                    int64_t hysteresis, std::optional<double> min_scale,
                                    std::optional<double> max_scale) {
  constexpr auto kFunction = "update_scale_";
  TORCH_CHECK_VALUE(scale.defined(), kFunction, ": expected scale to be a tensor, got None");
  const auto device = scale.device();
  check_single(kFunction, "scale", scale, at::kFloat, device, "scale");
  check_single(kFunction, "growth_tracker", growth_tracker, at::kInt, device, "scale");
  check_single(kFunction, "found_inf", found_inf, at::kFloat, device, "scale");
  const bool has_tracker = hysteresis_tracker.has_value() && hysteresis_tracker->defined();
  if (has_tracker) {
    check_single(kFunction, "hysteresis_tracker", *hysteresis_tracker, at::kInt, device, "scale");
  }
  TORCH_CHECK_VALUE(hysteresis >= 1 && hysteresis <= std::numeric_limits<std::int32_t>::max(),
                    kFunction, ": expected hysteresis in [1, 2147483647], got ", hysteresis);
  TORCH_CHECK_VALUE(hysteresis == 1 || has_tracker, kFunction,
                    ": expected a hysteresis_tracker with hysteresis ", hysteresis, ", got None");
  const float low = bound("min_scale", min_scale);
  const float high = bound("max_scale", max_scale);
  TORCH_CHECK_VALUE(!min_scale || !max_scale || low <= high, kFunction,
                    ": expected min_scale <= max_scale, got ", low, " > ", high);
  return {growth_factor,
          backoff_factor,
          growth_interval,
          static_cast<int32_t>(hysteresis),
          min_scale.has_value(),
          max_scale.has_value(),
          low,
          high};
}

}  // namespace fastamp::kernels
