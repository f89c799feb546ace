// SPDX-License-Identifier: Apache-2.0
#include "kernels/amp_args.h"
#include "kernels/functors/scale_record.h"
#include "ops/checks.h"
#include "ops/op.h"

#include <fastamp/ops/amp_ops.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace fastamp::ops {
namespace {

constexpr auto kFunction = "update_scale_";

void check_bound(const char* name, std::optional<double> value) {
  TORCH_CHECK_VALUE(!value || !std::isnan(*value), kFunction, ": expected ", name,
                    " to be a number, got NaN");
}

void check_rule(const kernels::UpdateScaleArgs& args) {
  TORCH_CHECK_VALUE(
      args.hysteresis >= 1 && args.hysteresis <= std::numeric_limits<std::int32_t>::max(),
      kFunction, ": expected hysteresis in [1, 2147483647], got ", args.hysteresis);
  TORCH_CHECK_VALUE(args.hysteresis == 1 || kernels::given(args.hysteresis_tracker), kFunction,
                    ": expected a hysteresis_tracker with hysteresis ", args.hysteresis,
                    ", got None");
  TORCH_CHECK_VALUE(args.fast_growth_interval >= 0, kFunction,
                    ": expected fast_growth_interval >= 0, got ", args.fast_growth_interval);
  TORCH_CHECK_VALUE((args.fast_growth_interval > 0) == kernels::given(args.fast_growth_limit),
                    kFunction,
                    ": expected fast_growth_limit and a fast_growth_interval above 0 together, got "
                    "fast_growth_interval ",
                    args.fast_growth_interval,
                    kernels::given(args.fast_growth_limit) ? " with a limit" : " without a limit");
  check_bound("min_scale", args.min_scale);
  check_bound("max_scale", args.max_scale);
  const auto low = static_cast<float>(args.min_scale.value_or(0.0));
  const auto high = static_cast<float>(args.max_scale.value_or(0.0));
  TORCH_CHECK_VALUE(!args.min_scale || !args.max_scale || low <= high, kFunction,
                    ": expected min_scale <= max_scale, got ", low, " > ", high);
}

void check_history(const kernels::UpdateScaleArgs& args, c10::Device device) {
  check_table(kFunction, "history", args.history, at::kFloat, device, -1,
              kernels::ScaleHistory::kColumns);
  check_optional(kFunction, "history_count", args.history_count, at::kLong, device, "scale");
  TORCH_CHECK_VALUE(kernels::given(args.history) == kernels::given(args.history_count), kFunction,
                    ": expected history and history_count together, got ",
                    kernels::given(args.history) ? "history" : "history_count", " alone");
  const auto* const norm = kernels::find_tensor(args.norm);
  const bool precise = norm != nullptr && norm->scalar_type() == at::kDouble;
  check_optional(kFunction, "norm", args.norm, precise ? at::kDouble : at::kFloat, device, "scale");
}

struct UpdateScale {
  using Args = kernels::UpdateScaleArgs;
  static constexpr auto kName = "update_scale_";
  static constexpr auto kArguments =
      std::tuple{FASTAMP_ARG(scale, Access::kWrite),
                 FASTAMP_ARG(growth_tracker, Access::kWrite),
                 FASTAMP_ARG(found_inf),
                 FASTAMP_ARG(growth_factor),
                 FASTAMP_ARG(backoff_factor),
                 FASTAMP_ARG(growth_interval),
                 FASTAMP_ARG(hysteresis_tracker, Access::kWrite),
                 FASTAMP_ARG(hysteresis, Access::kRead, "1"),
                 FASTAMP_ARG(min_scale),
                 FASTAMP_ARG(max_scale),
                 FASTAMP_ARG(inv_scale, Access::kWrite),
                 FASTAMP_ARG(norm),
                 FASTAMP_ARG(history, Access::kWrite),
                 FASTAMP_ARG(history_count, Access::kWrite),
                 FASTAMP_ARG(new_scale),
                 FASTAMP_ARG(fast_growth_limit, Access::kWrite),
                 FASTAMP_ARG(fast_growth_interval, Access::kRead, "0")};
  static constexpr auto kCpu = kernels::update_scale_cpu;
  static constexpr auto kCuda = &kernels::CudaKernels::update_scale;

  static void check(const Args& args) {
    const auto device = check_first(kFunction, "scale", args.scale, at::kFloat);
    check_single(kFunction, "growth_tracker", args.growth_tracker, at::kInt, device, "scale");
    check_single(kFunction, "found_inf", args.found_inf, at::kFloat, device, "scale");
    check_optional(kFunction, "hysteresis_tracker", args.hysteresis_tracker, at::kInt, device,
                   "scale");
    check_optional(kFunction, "inv_scale", args.inv_scale, at::kFloat, device, "scale");
    check_optional(kFunction, "new_scale", args.new_scale, at::kFloat, device, "scale");
    check_optional(kFunction, "fast_growth_limit", args.fast_growth_limit, at::kFloat, device,
                   "scale");
    check_rule(args);
    check_history(args, device);
  }
  static c10::Device device(const Args& args) { return args.scale.device(); }
};

FASTAMP_REGISTER_OP(UpdateScale);

}  // namespace

void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                   int64_t growth_interval, const std::optional<at::Tensor>& hysteresis_tracker,
                   int64_t hysteresis, std::optional<double> min_scale,
                   std::optional<double> max_scale, const std::optional<at::Tensor>& inv_scale,
                   const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& history,
                   const std::optional<at::Tensor>& history_count,
                   const std::optional<at::Tensor>& new_scale,
                   const std::optional<at::Tensor>& fast_growth_limit,
                   int64_t fast_growth_interval) {
  call_op<UpdateScale>({scale, growth_tracker, found_inf, growth_factor, backoff_factor,
                        growth_interval, hysteresis_tracker, hysteresis, min_scale, max_scale,
                        inv_scale, norm, history, history_count, new_scale, fast_growth_limit,
                        fast_growth_interval});
}

}  // namespace fastamp::ops
