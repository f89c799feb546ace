#include "scaler/scale_state.h"

#include "core/kernel_devices.h"
#include "kernels/functors/scale_record.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fastamp::scaler {
namespace {

int64_t read_or(const at::Tensor& tensor, int64_t otherwise) {
  return tensor.defined() ? tensor.item<int64_t>() : otherwise;
}

at::Tensor scalar_on(c10::Device device, at::ScalarType dtype, const at::Scalar& value) {
  return at::full({}, value, at::TensorOptions().dtype(dtype).device(device));
}

}  // namespace

void ScaleState::initialise(c10::Device device) {
  const c10::InferenceMode normal_mode(false);  // Updates outside of the caller's write them.
  ScaleTensors tensors;
  tensors.scale = scalar_on(device, at::kFloat, init_scale_);
  tensors.growth_tracker = scalar_on(device, at::kInt, init_growth_tracker_);
  if (rules_.hysteresis > 1) {
    tensors.hysteresis_tracker = scalar_on(device, at::kInt, init_hysteresis_tracker_);
  }
  ScaleRecords records;
  if (device.is_cuda() && has_kernels(c10::kCUDA)) {
    records.inv_scale = inverse_scale(tensors.scale);  // On the CPU a division costs less.
  }
  if (history_size_ > 0 && has_kernels(device.type())) {
    records.history = at::zeros({history_size_, kernels::ScaleHistory::kColumns},
                                at::TensorOptions(at::kFloat).device(device));
    records.history_count = scalar_on(device, at::kLong, 0);
  }
  tensors_ = std::move(tensors);
  records_ = std::move(records);
  write_history();
}

// NOLINTNEXTLINE(readability-make-member-function-const): the tensors it writes are its state
void ScaleState::write_history() {
  if (!keeps_history()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto host = at::zeros({history_size_, kernels::ScaleHistory::kColumns}, at::kFloat);
  auto rows = host.accessor<float, 2>();
  for (const auto& record : init_history_) {
    auto row = rows[record.step % history_size_];
    row[0] = static_cast<float>(record.scale);
    row[1] = record.skipped ? 1.0F : 0.0F;
    row[2] = static_cast<float>(record.norm);
    row[3] = static_cast<float>(record.growth_tracker);
  }
  records_.history.copy_(host);  // In place: a captured graph writes there.
  records_.history_count.fill_(init_history_.empty() ? 0 : init_history_.back().step + 1);
}

void ScaleState::load_history(std::vector<StepRecord> rows) {
  const auto kept = std::min(rows.size(), static_cast<std::size_t>(history_size_));
  rows.erase(rows.begin(), rows.end() - static_cast<std::ptrdiff_t>(kept));
  init_history_ = std::move(rows);
  write_history();
}

at::Tensor ScaleState::inv_scale() const {
  return records_.inv_scale.defined() ? records_.inv_scale : inverse_scale(tensors_.scale);
}

void ScaleState::refresh_inverse() {
  if (records_.inv_scale.defined()) {  // In place: a captured graph reads it there.
    records_.inv_scale.copy_(inverse_scale(tensors_.scale));
  }
}

void ScaleState::update(at::ArrayRef<at::Tensor> flags, const at::Tensor& norm,
                        const at::Tensor& new_scale) {
  records_.norm = norm;
  if (new_scale.defined()) {
    records_.new_scale = new_scale.to(tensors_.scale.device(), at::kFloat, /*non_blocking=*/true);
  }
  update_scale(tensors_, rules_, flags, records_);
  records_.norm = records_.new_scale = at::Tensor();
}

std::vector<StepRecord> ScaleState::history() const {
  if (!keeps_history()) {
    return init_history_;
  }
  std::vector<StepRecord> result;
  const auto count = records_.history_count.item<int64_t>();
  const auto host = records_.history.cpu();
  const auto rows = host.accessor<float, 2>();
  const auto first = init_history_.empty() ? 0 : init_history_.front().step;
  for (int64_t step = std::max(first, count - history_size_); step < count; ++step) {
    const auto row = rows[step % history_size_];
    result.push_back({.step = step,
                      .scale = row[0],
                      .skipped = row[1] != 0.0F,
                      .norm = row[2],
                      .growth_tracker = static_cast<int64_t>(row[3])});
  }
  return result;
}

at::Tensor ScaleState::scaled(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "scale: expected a tensor, got an undefined one");
  ++times_scaled_;
  if (!initialised()) {
    initialise(tensor.device());
  }
  return tensor.mul(tensors_.scale.to(tensor.device(), at::kFloat, /*non_blocking=*/true));
}

std::vector<at::Tensor> ScaleState::scaled(at::ArrayRef<at::Tensor> tensors) {
  ++times_scaled_;
  std::vector<at::Tensor> replicas;
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].defined(), "scale: expected outputs[", i,
                      "] to be a tensor, got an undefined one");
  }
  for (const auto& tensor : tensors) {
    if (!initialised()) {
      initialise(tensor.device());
    }
    const at::Tensor* replica = nullptr;
    for (const auto& candidate : replicas) {
      if (candidate.device() == tensor.device()) {
        replica = &candidate;
      }
    }
    if (replica == nullptr) {
      replica = &replicas.emplace_back(
          tensors_.scale.to(tensor.device(), at::kFloat, /*non_blocking=*/true));
    }
    results.push_back(tensor.mul(*replica));
  }
  return results;
}

// NOLINTNEXTLINE(readability-make-member-function-const): the tensor it writes is its state
void ScaleState::set_scale(const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  tensors_.scale.copy_(value.reshape({}));
  refresh_inverse();
}

double ScaleState::scale() const {
  return initialised() ? tensors_.scale.item<double>() : init_scale_;
}

int64_t ScaleState::growth_tracker() const {
  return read_or(tensors_.growth_tracker, init_growth_tracker_);
}

int64_t ScaleState::hysteresis_tracker() const {
  return read_or(tensors_.hysteresis_tracker, init_hysteresis_tracker_);
}

void ScaleState::load(double scale, int64_t growth_tracker, int64_t hysteresis_tracker) {
  init_scale_ = scale;
  init_growth_tracker_ = growth_tracker;
  init_hysteresis_tracker_ = hysteresis_tracker;
  if (!initialised()) {
    return;
  }
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;  // In place: a captured graph reads and writes them there.
  tensors_.scale.fill_(scale);
  tensors_.growth_tracker.fill_(growth_tracker);
  if (tensors_.hysteresis_tracker.defined()) {
    tensors_.hysteresis_tracker.fill_(hysteresis_tracker);
  } else if (rules_.hysteresis > 1) {
    tensors_.hysteresis_tracker =
        scalar_on(tensors_.scale.device(), at::kInt, init_hysteresis_tracker_);
  }
  refresh_inverse();
}

}  // namespace fastamp::scaler
