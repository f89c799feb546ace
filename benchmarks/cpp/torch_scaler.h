// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <limits>
#include <vector>

/// The ops of torch.amp.GradScaler on a CPU, in its order: LibTorch has no scaler of its own.
class TorchScaler {
 public:
  explicit TorchScaler(double scale) : scale_(at::full({1}, scale, at::kFloat)) {}

  void unscale_(torch::optim::Optimizer& optimizer) {
    std::vector<at::Tensor> gradients;
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        if (parameter.grad().defined()) {
          gradients.push_back(parameter.grad());
        }
      }
    }
    found_inf_ = at::zeros({1});
    const at::Tensor inv_scale = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf_, inv_scale);
  }

  /// After unscale_().
  void step(torch::optim::Optimizer& optimizer) {
    if (found_inf_.item<float>() == 0) {
      optimizer.step();
    }
  }

  void update() {
    at::_amp_update_scale_(scale_, tracker_, found_inf_, 2.0, 0.5,
                           std::numeric_limits<int32_t>::max());
  }

 private:
  at::Tensor scale_;
  at::Tensor tracker_ = at::zeros({1}, at::kInt);
  at::Tensor found_inf_;
};
