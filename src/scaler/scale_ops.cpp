// SPDX-License-Identifier: Apache-2.0
#include "scaler/scale_ops.h"

#include "core/device_copy.h"
#include "core/kernel_devices.h"
#include "ops/direct.h"
#include "scaler/functional_values.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

namespace fastamp::scaler {
namespace {

std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace

bool is_plain_cpu_scalar(const at::Tensor& tensor, at::ScalarType dtype) {
  return ops::is_ordinary_cpu(tensor) && tensor.scalar_type() == dtype && tensor.numel() == 1 &&
         !c10::impl::dispatch_mode_enabled();
}

void write_inverse(float scale, const at::Tensor& inverse) {
  *inverse.mutable_data_ptr<float>() = static_cast<float>(1.0 / static_cast<double>(scale));
}

at::Tensor inverse_scale(const at::Tensor& scale) {
  if (is_plain_cpu_scalar(scale, at::kFloat)) {  // Saves three dispatches.
    auto inverse =
        at::Tensor(at::detail::empty_cpu(scale.sizes(), at::TensorOptions().dtype(at::kFloat)));
    write_inverse(*scale.const_data_ptr<float>(), inverse);
    return inverse;
  }
  if (scale.device().type() == c10::kMPS) {  // Metal has no fp64.
    return scale.reciprocal();
  }
  return scale.to(at::kDouble).reciprocal().to(at::kFloat);
}

at::Tensor new_scalar(const at::Tensor& like, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  return is_plain_cpu_scalar(like, like.scalar_type())
             ? at::Tensor(at::detail::empty_cpu({}, options))
             : at::empty({}, options.device(like.device()));
}

at::Tensor new_flag(const at::Tensor& scale) {
  if (is_plain_cpu_scalar(scale, at::kFloat)) {
    auto flag = new_scalar(scale, at::kFloat);
    *flag.mutable_data_ptr<float>() = 0.0F;
    return flag;
  }
  const BelowFunctionalization below(kFunctionalization);
  return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(scale.device()));
}

at::Tensor flag_without_value(const at::Tensor& scale) {
  const BelowFunctionalization below(kFunctionalization);
  return new_scalar(scale, at::kFloat);
}

at::Tensor combine_flags(at::ArrayRef<at::Tensor> flags, c10::Device device) {
  TORCH_INTERNAL_ASSERT(!flags.empty());
  const auto fetch = [&](const at::Tensor& flag) {
    const auto here = on_device(flag, device, flag.scalar_type());
    return here.dim() == 0 ? here : here.reshape({});
  };
  if (flags.size() == 1) {
    return fetch(flags[0]);
  }
  // Not a sum: 1 + 1 is 2, and code that compares a flag with 1 would take that for "finite".
  auto any = fetch(flags[0]).ne(0);
  for (const auto& flag : flags.slice(1)) {
    any = any.logical_or(fetch(flag).ne(0));
  }
  return any.to(at::kFloat);
}

at::Tensor binary_flag(at::ArrayRef<at::Tensor> flags, c10::Device device) {
  const auto any = combine_flags(flags, device);
  auto binary = at::empty({}, any.options().dtype(at::kFloat));
  return at::ne_out(binary, any, 0);  // One kernel: the comparison casts as it stores.
}

void update_scale(ScaleTensors& state, const ScaleRules& rules, at::ArrayRef<at::Tensor> flags,
                  const ScaleRecords& records) {
  const BelowFunctionalization below(kFunctionalization);
  const auto found_inf = combine_flags(flags, state.scale.device());
  if (!has_kernels(state.scale.device().type())) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        rules.hysteresis == 1 && !rules.min_scale && !rules.max_scale &&
            rules.fast_growth_interval == 0,
        "update: expected the scale on a cpu or cuda device when min_scale, max_scale, hysteresis "
        "or fast_growth_interval is used, got ",
        state.scale.device());
    if (records.new_scale.defined()) {
      state.scale.copy_(records.new_scale);
      return;
    }
    at::_amp_update_scale_(state.scale, state.growth_tracker, found_inf, rules.growth_factor,
                           rules.backoff_factor, rules.growth_interval);
    return;
  }
  ops::update_scale_(state.scale, state.growth_tracker, found_inf, rules.growth_factor,
                     rules.backoff_factor, rules.growth_interval, given(state.hysteresis_tracker),
                     rules.hysteresis, rules.min_scale, rules.max_scale, given(records.inv_scale),
                     given(records.norm), given(records.history), given(records.history_count),
                     given(records.new_scale), given(state.fast_growth_limit),
                     rules.fast_growth_interval);
}

}  // namespace fastamp::scaler
