// SPDX-License-Identifier: Apache-2.0
#include "scaler/scale_ops.h"

#include "core/device_copy.h"
#include "core/kernel_devices.h"
#include "core/tensor_kind.h"
#include "core/tensor_version.h"
#include "kernels/functors/scale_record.h"
#include "scaler/functional_values.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fastamp::scaler {
namespace {

std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

std::int64_t rows_after(const std::vector<StepRecord>& loaded) {
  return loaded.empty() ? 0 : loaded.back().step + 1;
}

}  // namespace

bool is_plain_cpu_scalar(const at::Tensor& tensor, at::ScalarType dtype) {
  return is_ordinary_cpu(tensor) && tensor.scalar_type() == dtype && tensor.numel() == 1 &&
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

bool is_spare_flag(const at::Tensor& flag, const at::Tensor& scale) {
  return flag.defined() && flag.use_count() == 1 && flag.storage().use_count() == 1 &&
         flag.is_inference() == c10::InferenceMode::is_enabled() &&
         is_plain_cpu_scalar(flag, at::kFloat) && scale.device().is_cpu();
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

void ScaleHistory::prepare(const at::Tensor& scale) {
  if (scale_.is_same(scale)) {
    return;
  }
  // Updates outside of the caller's modes write them.
  const c10::InferenceMode normal_mode(false);
  const BelowFunctionalization below(kFunctionalization);
  const auto device = scale.device();
  if (!device.is_cuda() || !has_kernels(c10::kCUDA)) {
    inv_scale_ = at::Tensor();  // A division costs less than keeping its result.
  } else if (!inv_scale_.defined() || inv_scale_.device() != device) {
    inv_scale_ = inverse_scale(scale);
  } else {
    inv_scale_.copy_(inverse_scale(scale));
  }
  if (!history_.defined() || history_.device() != device) {
    const bool kept = history_size_ > 0 && has_kernels(device.type());
    const auto options = at::TensorOptions().device(device);
    at::Tensor history;
    at::Tensor count;
    if (kept) {
      history =
          at::zeros({history_size_, kernels::ScaleHistory::kColumns}, options.dtype(at::kFloat));
      count = at::zeros({}, options.dtype(at::kLong));
      write_history(loaded_, history, count);
      rows_ = rows_after(loaded_);
    }
    history_ = std::move(history);
    history_count_ = std::move(count);
  }
  scale_ = scale;
  note_update(scale);
}

void ScaleHistory::note_update(const at::Tensor& scale) {
  if (inv_scale_.defined() && !scale.is_inference()) {
    inv_scale_version_ = version_of(scale);
  }
}

at::Tensor ScaleHistory::kept_inverse(const at::Tensor& scale) const {
  const bool holds = inv_scale_.defined() && scale_.is_same(scale) && !scale.is_inference() &&
                     version_of(scale) == inv_scale_version_;
  return holds ? inv_scale_ : at::Tensor();
}

at::Tensor ScaleHistory::inv_scale(const at::Tensor& scale) const {
  auto kept = kept_inverse(scale);
  return kept.defined() ? kept : inverse_scale(scale);
}

void ScaleHistory::refresh(const at::Tensor& scale) {
  if (inv_scale_.defined() && !kept_inverse(scale).defined()) {
    const at::NoGradGuard no_grad;
    inv_scale_.copy_(inverse_scale(scale));  // In place: a captured graph reads it there.
    note_update(scale);
  }
}

void ScaleHistory::update(ScaleTensors& tensors, const ScaleRules& rules,
                          at::ArrayRef<at::Tensor> flags, const at::Tensor& norm,
                          const at::Tensor& new_scale) {
  prepare(tensors.scale);
  ScaleRecords records{.inv_scale = inv_scale_,
                       .norm = norm,
                       .history = history_,
                       .history_count = history_count_,
                       .new_scale = {}};
  if (new_scale.defined()) {
    records.new_scale = on_device(new_scale, tensors.scale.device(), at::kFloat);
  }
  update_scale(tensors, rules, flags, records);
  note_update(tensors.scale);
}

void ScaleHistory::write_history(const std::vector<StepRecord>& loaded, const at::Tensor& history,
                                 const at::Tensor& count) const {
  const at::NoGradGuard no_grad;  // All in place: a captured graph writes there.
  if (loaded.empty()) {           // Without a copy from the host, which waits for the device.
    history.zero_();
    count.zero_();
    return;
  }
  const auto host = at::zeros({history_size_, kernels::ScaleHistory::kColumns}, at::kFloat);
  auto rows = host.accessor<float, 2>();
  for (const auto& record : loaded) {
    auto row = rows[record.step % history_size_];
    row[0] = static_cast<float>(record.scale);
    row[1] = record.skipped ? 1.0F : 0.0F;
    row[2] = static_cast<float>(record.norm);
    row[3] = static_cast<float>(record.growth_tracker);
  }
  history.copy_(host);
  count.fill_(rows_after(loaded));
}

void ScaleHistory::load_history(std::vector<StepRecord> rows) {
  const auto kept = std::min(rows.size(), static_cast<std::size_t>(history_size_));
  rows.erase(rows.begin(), rows.end() - static_cast<std::ptrdiff_t>(kept));
  if (keeps_history()) {
    write_history(rows, history_, history_count_);
    rows_ = rows_after(rows);
  }
  loaded_ = std::move(rows);
}

at::Tensor ScaleHistory::next_row() const { return history_.select(0, rows_ % history_size_); }

std::vector<StepRecord> ScaleHistory::history() const {
  if (!keeps_history()) {
    return loaded_;
  }
  std::vector<StepRecord> result;
  const auto count = history_count_.item<std::int64_t>();
  const auto host = history_.cpu();
  const auto rows = host.accessor<float, 2>();
  // A loaded history may begin later than the ring reaches back.
  const auto first = loaded_.empty() ? 0 : loaded_.front().step;
  for (auto step = std::max(first, count - history_size_); step < count; ++step) {
    const auto row = rows[step % history_size_];
    result.push_back({.step = step,
                      .scale = row[0],
                      .skipped = row[1] != 0.0F,
                      .norm = row[2],
                      .growth_tracker = static_cast<std::int64_t>(row[3])});
  }
  return result;
}

}  // namespace fastamp::scaler
