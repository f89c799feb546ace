// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "faults/every_allocation.h"

#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

namespace fastamp::test {

/// Values that differ, so that a part that is missing shows.
at::Tensor numbers(const std::vector<int64_t>& sizes, double factor = 1.0);

using Parameters = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters&)>;

/// Parameters with scaled gradients, an optimizer, and a scaler that has its scale.
struct Training {
  Training(const Parameters& shapes, const MakeOptimizer& make, const GradScalerOptions& scaling);

  /// Makes new gradients. That of the last parameter lies in memory with gaps.
  void fill();
  /// Parameters, gradients, what the optimizer has of each parameter, scale and history. States
  /// that say no more than that there was no step count as none.
  Seen look() const;

  Parameters parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  GradScaler scaler;
  at::Tensor kept;  ///< What a call makes and the subject holds.
};

using Call = std::function<void(Training&)>;

/// Makes subjects of a call in training.
/// @param shapes  Tensors of the parameters' shapes and dtypes.
/// @param first   Called beforehand.
MakeSubject training(const Parameters& shapes, const MakeOptimizer& make, const Call& call,
                     const GradScalerOptions& scaling = {}, const Call& first = {});

/// Float32 and bfloat16 matrices and a vector.
Parameters mixed_shapes();

template <typename Optimizer, typename Options>
MakeOptimizer with(const Options& options) {
  return [options](const Parameters& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    using Group = torch::optim::OptimizerParamGroup;
    std::vector<Group> groups;
    groups.emplace_back(Parameters(parameters.begin(), parameters.end() - 1));
    groups.emplace_back(Parameters{parameters.back()});
    return std::make_unique<Optimizer>(groups, options);
  };
}

}  // namespace fastamp::test
