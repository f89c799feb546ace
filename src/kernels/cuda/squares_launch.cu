// SPDX-License-Identifier: Apache-2.0
// CUDA kernels that add up squares of gradients (squares.cuh): one for reading, one that unscales.

#include "kernels/cuda/squares.cuh"
#include "kernels/cuda/squares_launch.h"
#include "kernels/cuda/zeroed_workspace.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>

namespace fastamp::kernels::cuda {
namespace {

template <bool kWrites>
void launch_squares(const DenseGrads& list, const SquaresRequest& request) {
  const bool counted = request.counts != nullptr;
  const auto stream = at::cuda::getCurrentCUDAStream();
  const ZeroedWorkspace memory(squares_zeros_bytes(counted ? list.listed : 0), stream);
  auto* zeros = static_cast<SquaresZeros*>(memory.get());
  std::vector<TensorEntry<2>> entries;
  entries.reserve(list.grads.size());
  std::int64_t chunks = 0;
  for (const auto& grad : list.grads) {
    entries.push_back({{grad.data, counted ? zeros->row(grad.index) : nullptr},
                       grad.numel,
                       static_cast<std::uint8_t>(grad.dtype)});
    chunks += chunk_count(grad.numel, SquaresOp<kWrites>::kChunkNumel);
  }
  using Op = SquaresOp<kWrites>;
  const auto runs = static_cast<std::uint32_t>(std::min<std::int64_t>(chunks, Op::kMaxRuns));
  // From the caching allocator: reuse is ordered by the stream, and under capture by the graph.
  const auto partial =
      c10::cuda::CUDACachingAllocator::get()->allocate(std::size_t{runs} * sizeof(double));
  multi_tensor_apply(entries, Op{request.inv_scale, request.found_inf,
                                 static_cast<double*>(partial.get()), runs, &zeros->arrivals, zeros,
                                 request.counts, static_cast<std::int64_t>(2 * list.listed),
                                 request.norm, request.overwrite_found_inf});
}

}  // namespace

DenseGrads gather_grads(at::TensorList grads, bool writes) {
  DenseGrads list;
  list.listed = grads.size();
  list.grads.reserve(grads.size());
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& grad = grads[i];
    if (grad.numel() == 0) {
      continue;
    }
    at::Tensor copy;
    if (!grad.is_non_overlapping_and_dense()) {
      copy = grad.contiguous();
      list.copies.push_back(copy);
      list.copied.push_back(i);
    }
    const at::Tensor& dense = copy.defined() ? copy : grad;
    // What is only read must not materialise a copy-on-write tensor.
    void* data = writes ? dense.mutable_data_ptr() : const_cast<void*>(dense.const_data_ptr());
    list.grads.push_back({data, grad.numel(), grad.scalar_type(), i});
  }
  return list;
}

void sum_squares(const DenseGrads& list, const SquaresRequest& request) {
  launch_squares<false>(list, request);
}

void unscale_and_sum_squares(const DenseGrads& list, const SquaresRequest& request) {
  launch_squares<true>(list, request);
}

}  // namespace fastamp::kernels::cuda
