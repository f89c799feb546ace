// SPDX-License-Identifier: Apache-2.0
#include "scaler/scale_history.h"

#include "core/device_copy.h"
#include "core/kernel_devices.h"
#include "core/tensor_version.h"
#include "kernels/functors/scale_record.h"
#include "scaler/functional_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fastamp::scaler {

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
    history_ = kept ? at::zeros({history_size_, kernels::ScaleHistory::kColumns},
                                options.dtype(at::kFloat))
                    : at::Tensor();
    history_count_ = kept ? at::zeros({}, options.dtype(at::kLong)) : at::Tensor();
    write_history();
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

void ScaleHistory::write_history() {
  if (!keeps_history()) {
    return;
  }
  const at::NoGradGuard no_grad;  // All in place: a captured graph writes there.
  rows_ = loaded_.empty() ? 0 : loaded_.back().step + 1;
  if (loaded_.empty()) {
    history_.zero_();
    history_count_.zero_();
    return;
  }
  const auto host = at::zeros({history_size_, kernels::ScaleHistory::kColumns}, at::kFloat);
  auto rows = host.accessor<float, 2>();
  for (const auto& record : loaded_) {
    auto row = rows[record.step % history_size_];
    row[0] = static_cast<float>(record.scale);
    row[1] = record.skipped ? 1.0F : 0.0F;
    row[2] = static_cast<float>(record.norm);
    row[3] = static_cast<float>(record.growth_tracker);
  }
  history_.copy_(host);
  history_count_.fill_(rows_);
}

void ScaleHistory::load_history(std::vector<StepRecord> rows) {
  const auto kept = std::min(rows.size(), static_cast<std::size_t>(history_size_));
  rows.erase(rows.begin(), rows.end() - static_cast<std::ptrdiff_t>(kept));
  loaded_ = std::move(rows);
  write_history();
}

at::Tensor ScaleHistory::last_row() const {
  return history_.select(0, (rows_ - 1) % history_size_);
}

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
