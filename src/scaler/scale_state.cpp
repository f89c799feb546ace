#include "scaler/scale_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

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
  ScaleTensors tensors;
  tensors.scale = scalar_on(device, at::kFloat, init_scale_);
  tensors.growth_tracker = scalar_on(device, at::kInt, init_growth_tracker_);
  if (rules_.hysteresis > 1) {
    tensors.hysteresis_tracker = scalar_on(device, at::kInt, init_hysteresis_tracker_);
  }
  tensors_ = std::move(tensors);
}

at::Tensor ScaleState::scaled(const at::Tensor& tensor) {
  if (!initialised()) {
    initialise(tensor.device());
  }
  return tensor.mul(tensors_.scale.to(tensor.device(), at::kFloat, /*non_blocking=*/true));
}

std::vector<at::Tensor> ScaleState::scaled(at::ArrayRef<at::Tensor> tensors) {
  std::vector<at::Tensor> replicas;
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
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

// NOLINTBEGIN(readability-make-member-function-const): the tensor it writes is its state
void ScaleState::set_scale(double value) {
  const at::NoGradGuard no_grad;
  tensors_.scale.fill_(value);
}

void ScaleState::set_scale(const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  tensors_.scale.copy_(value);
}
// NOLINTEND(readability-make-member-function-const)

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
  if (initialised()) {
    initialise(tensors_.scale.device());
  }
}

}  // namespace fastamp::scaler
