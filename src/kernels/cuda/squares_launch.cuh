#pragma once

// Launches of a pass that adds up squares: the pass itself, then the sum of its chunks.

#include "kernels/cuda/squares.cuh"

#include <c10/cuda/CUDACachingAllocator.h>

#include <vector>

namespace fastamp::kernels::cuda {

/// Gradients in dense memory; `copies` stand in for grads[copied[i]].
struct GradEntries {
  std::vector<TensorEntry<3>> entries;
  std::vector<at::Tensor> copies;
  std::vector<std::size_t> copied;
  std::int64_t chunks = 0;
};

/// What a pass is asked for beside the sums; addresses on the device.
struct SquaresRequest {
  const float* inv_scale;
  float* found_inf;
  std::int64_t* counts;  ///< [number of gradients][2], or null.
  NormResults norm;
};

/// Entries without their scratch; `writes` says that the gradients will be changed.
GradEntries gather_grads(at::TensorList grads, bool writes);

/// Runs the pass on the current stream of the current device.
template <bool kWrites>
void launch_squares(GradEntries& list, std::size_t grads, const SquaresRequest& request);

extern template void launch_squares<false>(GradEntries&, std::size_t, const SquaresRequest&);
extern template void launch_squares<true>(GradEntries&, std::size_t, const SquaresRequest&);

}  // namespace fastamp::kernels::cuda
