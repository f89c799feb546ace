// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

// So close to 1 that gradients stay normal numbers, though each call divides by it again.
constexpr double kScale = 1.0001;
constexpr int64_t kElements = 16;

/// Parameters with gradients of ones, each an allocation of its own.
inline std::vector<at::Tensor> make_parameters(int64_t count) {
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < count; ++i) {
    parameters.push_back(at::zeros({kElements}).set_requires_grad(true));
    parameters.back().mutable_grad() = at::ones({kElements});
  }
  return parameters;
}

/// A scaler that has a scale and never changes it.
inline fastamp::GradScaler make_scaler() {
  fastamp::GradScaler scaler(
      fastamp::GradScalerOptions().device(at::kCPU).init_scale(kScale).growth_interval(
          std::numeric_limits<int32_t>::max()));
  scaler.scale(at::ones({}));
  return scaler;
}
