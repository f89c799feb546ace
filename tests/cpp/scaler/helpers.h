// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <vector>

namespace fastamp::test {

inline GradScalerOptions cpu_options() { return GradScalerOptions().device(c10::kCPU); }

/// A parameter of ones with a gradient of one repeated value.
inline at::Tensor parameter_with(float gradient, int64_t size = 2) {
  auto parameter = at::ones({size}).requires_grad_(true);
  parameter.mutable_grad() = at::full({size}, gradient);
  return parameter;
}

inline torch::optim::SGD sgd(const std::vector<at::Tensor>& parameters, double lr = 1.0) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(lr));
}

/// A scaler whose scale exists already.
inline GradScaler started(const GradScalerOptions& options) {
  GradScaler scaler(options);
  scaler.scale(at::ones({}));
  return scaler;
}

}  // namespace fastamp::test
