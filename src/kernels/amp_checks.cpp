#include "kernels/amp_checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

namespace fastamp::kernels {
namespace {

/// The slow half of the gradient check: says what is wrong with grads[index], if anything is.
void check_written_gradient(const at::Tensor& t, size_t index, c10::Device device) {
  constexpr auto kFunction = "unscale_and_check_: expected grads[";
  TORCH_CHECK_VALUE(t.defined(), kFunction, index, "] to be a tensor, got an undefined one");
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

/// What is wrong with grads[index] of norm_and_check_, if anything is.
void check_read_gradient(const at::Tensor& t, size_t index, c10::Device device) {
  constexpr auto kFunction = "norm_and_check_: expected grads[";
  TORCH_CHECK_VALUE(t.defined(), kFunction, index, "] to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, kFunction, index, "] to be strided, got layout ",
                    t.layout());
  TORCH_CHECK_TYPE(is_gradient_dtype(t.scalar_type()) && t.scalar_type() != at::kDouble, kFunction,
                   index, "] to be Half, BFloat16 or Float, got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.device() == device, kFunction, index, "] on ", device,
                    ", the device of inv_scale, got ", t.device());
}

/// The same for a tensor that may be None.
void check_optional(const char* fn, const char* name, const std::optional<at::Tensor>& t,
                    at::ScalarType dtype, c10::Device device, const char* device_of) {
  if (const auto* const tensor = find_tensor(t)) {
    check_single(fn, name, *tensor, dtype, device, device_of);
  }
}

/// A table of `rows` (any number of them, but at least one, if negative) times `columns`.
void check_table(const char* fn, const char* name, const std::optional<at::Tensor>& table,
                 at::ScalarType dtype, c10::Device device, std::int64_t rows,
                 std::int64_t columns) {
  const auto* const t = find_tensor(table);
  if (t == nullptr) {
    return;
  }
  TORCH_CHECK_TYPE(t->scalar_type() == dtype, fn, ": expected ", name, " to be ",
                   c10::toString(dtype), ", got ", t->scalar_type());
  TORCH_CHECK_VALUE(t->device() == device, fn, ": expected ", name, " on ", device, ", got ",
                    t->device());
  const bool fits = t->layout() == at::kStrided && t->dim() == 2 && t->is_contiguous() &&
                    t->sym_size(1) == columns &&
                    (rows < 0 ? t->sym_size(0) >= 1 : t->sym_size(0) == rows);
  TORCH_CHECK_VALUE(fits, fn, ": expected ", name, " to be contiguous of shape [",
                    rows < 0 ? "at least 1" : std::to_string(rows), ", ", columns, "], got shape ",
                    t->sym_sizes());
}

void check_counts(const char* fn, const std::optional<at::Tensor>& counts, c10::Device device,
                  std::size_t grads) {
  check_table(fn, "non_finite_counts", counts, at::kLong, device, static_cast<std::int64_t>(grads),
              2);
}

void check_bound(const char* name, std::optional<double> value) {
  TORCH_CHECK_VALUE(!value || !std::isnan(*value), "update_scale_: expected ", name,
                    " to be a number, got NaN");
}

void check_history(const UpdateScaleArgs& args, c10::Device device) {
  constexpr auto kFunction = "update_scale_";
  check_table(kFunction, "history", args.history, at::kFloat, device, -1, ScaleHistory::kWidth);
  check_optional(kFunction, "history_count", args.history_count, at::kLong, device, "scale");
  TORCH_CHECK_VALUE(given(args.history) == given(args.history_count), kFunction,
                    ": expected history and history_count together, got ",
                    given(args.history) ? "history" : "history_count", " alone");
  const auto* const norm = find_tensor(args.norm);
  const bool precise = norm != nullptr && norm->scalar_type() == at::kDouble;
  check_optional(kFunction, "norm", args.norm, precise ? at::kDouble : at::kFloat, device, "scale");
}

}  // namespace

void check_unscale(const UnscaleArgs& args) {
  constexpr auto kFunction = "unscale_and_check_";
  TORCH_CHECK_VALUE(args.inv_scale.defined(), kFunction,
                    ": expected inv_scale to be a tensor, got an undefined one");
  const auto device = args.inv_scale.device();
  check_single(kFunction, "inv_scale", args.inv_scale, at::kFloat, device, "inv_scale");
  check_single(kFunction, "found_inf", args.found_inf, at::kFloat, device, "inv_scale");
  check_optional(kFunction, "sum_of_squares", args.sum_of_squares, at::kDouble, device,
                 "inv_scale");
  check_counts(kFunction, args.non_finite_counts, device, args.grads.size());
  for (size_t i = args.arrays.size(); i < args.grads.size(); ++i) {
    const at::Tensor& t = args.grads[i];
    // Dense gradients of a good dtype are nearly all there are: five loads and no call for them.
    if (C10_LIKELY(t.defined() && t.device() == device && t.layout() == at::kStrided &&
                   is_gradient_dtype(t.scalar_type()) && t.is_non_overlapping_and_dense())) {
      continue;
    }
    check_written_gradient(t, i, device);
  }
}

void check_norm(const NormArgs& args) {
  constexpr auto kFunction = "norm_and_check_";
  TORCH_CHECK_VALUE(args.inv_scale.defined(), kFunction,
                    ": expected inv_scale to be a tensor, got an undefined one");
  const auto device = args.inv_scale.device();
  check_single(kFunction, "inv_scale", args.inv_scale, at::kFloat, device, "inv_scale");
  check_single(kFunction, "found_inf", args.found_inf, at::kFloat, device, "inv_scale");
  check_single(kFunction, "sum_of_squares", args.sum_of_squares, at::kDouble, device, "inv_scale");
  check_optional(kFunction, "clip_coef", args.clip_coef, at::kFloat, device, "inv_scale");
  check_optional(kFunction, "total_norm", args.total_norm, at::kFloat, device, "inv_scale");
  TORCH_CHECK_VALUE(args.max_norm.has_value() == given(args.clip_coef), kFunction,
                    ": expected max_norm and clip_coef together, got ",
                    args.max_norm ? "max_norm" : "clip_coef", " alone");
  check_counts(kFunction, args.non_finite_counts, device, args.grads.size());
  for (size_t i = args.arrays.size(); i < args.grads.size(); ++i) {
    check_read_gradient(args.grads[i], i, device);
  }
}

void check_single(const char* fn, const char* name, const at::Tensor& t, at::ScalarType dtype,
                  c10::Device device, const char* device_of) {
  TORCH_CHECK_VALUE(t.defined(), fn, ": expected ", name, " to be a tensor, got an undefined one");
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, fn, ": expected ", name, " to be ",
                   c10::toString(dtype), ", got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, fn, ": expected ", name,
                    " to be strided, got layout ", t.layout());
  TORCH_CHECK_VALUE(t.numel() == 1, fn, ": expected ", name, " to have one element, got ",
                    t.numel());
  TORCH_CHECK_VALUE(t.device() == device, fn, ": expected ", name, " on ", device,
                    ", the device of ", device_of, ", got ", t.device());
}

void check_update_scale(const UpdateScaleArgs& args) {
  constexpr auto kFunction = "update_scale_";
  TORCH_CHECK_VALUE(args.scale.defined(), kFunction,
                    ": expected scale to be a tensor, got an undefined one");
  const auto device = args.scale.device();
  check_single(kFunction, "scale", args.scale, at::kFloat, device, "scale");
  check_single(kFunction, "growth_tracker", args.growth_tracker, at::kInt, device, "scale");
  check_single(kFunction, "found_inf", args.found_inf, at::kFloat, device, "scale");
  check_optional(kFunction, "hysteresis_tracker", args.hysteresis_tracker, at::kInt, device,
                 "scale");
  check_optional(kFunction, "inv_scale", args.inv_scale, at::kFloat, device, "scale");
  check_optional(kFunction, "new_scale", args.new_scale, at::kFloat, device, "scale");
  TORCH_CHECK_VALUE(
      args.hysteresis >= 1 && args.hysteresis <= std::numeric_limits<std::int32_t>::max(),
      kFunction, ": expected hysteresis in [1, 2147483647], got ", args.hysteresis);
  TORCH_CHECK_VALUE(args.hysteresis == 1 || given(args.hysteresis_tracker), kFunction,
                    ": expected a hysteresis_tracker with hysteresis ", args.hysteresis,
                    ", got None");
  check_bound("min_scale", args.min_scale);
  check_bound("max_scale", args.max_scale);
  const auto low = static_cast<float>(args.min_scale.value_or(0.0));
  const auto high = static_cast<float>(args.max_scale.value_or(0.0));
  TORCH_CHECK_VALUE(!args.min_scale || !args.max_scale || low <= high, kFunction,
                    ": expected min_scale <= max_scale, got ", low, " > ", high);
  check_history(args, device);
}

NormResults norm_results(const UnscaleArgs& args) {
  return {mutable_pointer<double>(args.sum_of_squares), nullptr, nullptr, 0.0F};
}

NormResults norm_results(const NormArgs& args) {
  return {args.sum_of_squares.mutable_data_ptr<double>(), mutable_pointer<float>(args.total_norm),
          mutable_pointer<float>(args.clip_coef), static_cast<float>(args.max_norm.value_or(0.0))};
}

ScaleUpdate scale_update(const UpdateScaleArgs& args) {
  const auto* const norm = find_tensor(args.norm);
  const auto* const history_rows = find_tensor(args.history);
  const bool precise = norm != nullptr && norm->scalar_type() == at::kDouble;
  const ScaleHistory history{mutable_pointer<float>(args.history),
                             history_rows == nullptr ? 0 : history_rows->size(0),
                             mutable_pointer<std::int64_t>(args.history_count),
                             norm == nullptr || precise ? nullptr : norm->const_data_ptr<float>(),
                             precise ? norm->const_data_ptr<double>() : nullptr};
  const UpdateScale rule{args.growth_factor,
                         args.backoff_factor,
                         args.growth_interval,
                         static_cast<std::int32_t>(args.hysteresis),
                         args.min_scale.has_value(),
                         args.max_scale.has_value(),
                         static_cast<float>(args.min_scale.value_or(0.0)),
                         static_cast<float>(args.max_scale.value_or(0.0))};
  return {rule,
          args.scale.mutable_data_ptr<float>(),
          args.growth_tracker.mutable_data_ptr<std::int32_t>(),
          mutable_pointer<std::int32_t>(args.hysteresis_tracker),
          args.found_inf.const_data_ptr<float>(),
          mutable_pointer<float>(args.inv_scale),
          history,
          args.new_scale.has_value() && args.new_scale->defined()
              ? args.new_scale->const_data_ptr<float>()
              : nullptr};
}

}  // namespace fastamp::kernels
