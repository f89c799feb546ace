// SPDX-License-Identifier: Apache-2.0
#include "scaler/scale_state.h"

#include "core/device_copy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

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
  if (rules_.fast_growth_interval > 0) {
    tensors.fast_growth_limit = scalar_on(device, at::kFloat, init_fast_growth_limit_);
  }
  tensors_ = std::move(tensors);
}

at::Tensor ScaleState::scaled(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "scale: expected a tensor, got an undefined one");
  if (!initialised()) {
    initialise(tensor.device());
  }
  auto result = tensor.mul(on_device(tensors_.scale, tensor.device(), at::kFloat));
  ++times_scaled_;
  return result;
}

std::vector<at::Tensor> ScaleState::scaled(at::ArrayRef<at::Tensor> tensors) {
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
      replica = &replicas.emplace_back(on_device(tensors_.scale, tensor.device(), at::kFloat));
    }
    results.push_back(tensor.mul(*replica));
  }
  ++times_scaled_;
  return results;
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

double ScaleState::fast_growth_limit() const {
  const auto& limit = tensors_.fast_growth_limit;
  return limit.defined() ? limit.item<double>() : init_fast_growth_limit_;
}

ScaleTensors ScaleState::tensors_for(const ScaleRules& rules) const {
  auto tensors = tensors_;
  if (initialised()) {
    const c10::InferenceMode normal_mode(false);
    const auto device = tensors.scale.device();
    if (!tensors.hysteresis_tracker.defined() && rules.hysteresis > 1) {
      tensors.hysteresis_tracker = scalar_on(device, at::kInt, 0);
    }
    if (!tensors.fast_growth_limit.defined() && rules.fast_growth_interval > 0) {
      tensors.fast_growth_limit = scalar_on(device, at::kFloat, 0.0);
    }
  }
  return tensors;
}

void ScaleState::load(const ScaleRules& rules, const ScaleTensors& tensors, double scale,
                      int64_t growth_tracker, int64_t hysteresis_tracker,
                      double fast_growth_limit) {
  rules_ = rules;
  tensors_ = tensors;
  init_scale_ = scale;
  init_growth_tracker_ = growth_tracker;
  init_hysteresis_tracker_ = hysteresis_tracker;
  init_fast_growth_limit_ = fast_growth_limit;
  if (!initialised()) {
    return;
  }
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;  // In place: a captured graph reads and writes them there.
  tensors_.scale.fill_(scale);
  tensors_.growth_tracker.fill_(growth_tracker);
  if (tensors_.hysteresis_tracker.defined()) {
    tensors_.hysteresis_tracker.fill_(hysteresis_tracker);
  }
  if (tensors_.fast_growth_limit.defined()) {
    tensors_.fast_growth_limit.fill_(fast_growth_limit);
  }
}

}  // namespace fastamp::scaler
