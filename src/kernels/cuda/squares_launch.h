// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches of a pass that adds up squares (squares.cuh), for plain C++.

#include "kernels/cuda/launch_plan.h"
#include "kernels/functors/norm.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastamp::kernels::cuda {

/// Gradients in dense memory, without the empty ones; `copies` stand in for grads[copied[i]].
struct DenseGrads {
  struct Grad {
    void* data;
    std::int64_t numel;
    at::ScalarType dtype;
    std::size_t index;  ///< In the list of the call.
  };
  std::vector<Grad> grads;
  std::vector<at::Tensor> copies;
  std::vector<std::size_t> copied;
  std::size_t listed = 0;  ///< Gradients of the call, empty ones included.
};

/// `writes` says that the gradients will be changed.
DenseGrads gather_grads(at::TensorList grads, bool writes);

/// Results of a pass beside the sums; addresses are on the device.
struct SquaresRequest {
  const float* inv_scale;
  float* found_inf;
  std::int64_t* counts;  ///< [listed][2], or null.
  NormResults norm;
  bool overwrite_found_inf;  ///< Else found_inf is raised where that is due, and never lowered.
};

/// Run the pass on the current stream of the current device, in one launch.
void sum_squares(const DenseGrads& list, const SquaresRequest& request);
void unscale_and_sum_squares(const DenseGrads& list, const SquaresRequest& request);

}  // namespace fastamp::kernels::cuda
