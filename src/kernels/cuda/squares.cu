// CUDA kernels that add up squares of gradients (squares.cuh): one for reading, one that unscales,
// and the sum of their chunks.

#include "kernels/cuda/squares_launch.cuh"

#include <ATen/cuda/CUDAContext.h>

namespace fastamp::kernels::cuda {
namespace {

constexpr unsigned kFinishThreads = 1024;

struct Finish {
  const double* partial;
  std::int64_t chunks;
  const float* inv_scale;
  NormResults norm;
  const CountScratch* scratch;  ///< Null: no counts.
  std::int64_t* counts;
  std::int64_t count_words;
};

/// One block: thread t adds the sums t, t + 1024, ...; then the threads are added pairwise.
__global__ void __launch_bounds__(kFinishThreads) squares_finish_kernel(Finish finish) {
  __shared__ double sums[kFinishThreads];
  double sum = 0.0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < finish.chunks; i += kFinishThreads) {
    sum += finish.partial[i];
  }
  sums[threadIdx.x] = sum;
  for (unsigned width = kFinishThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) {
      sums[threadIdx.x] += sums[threadIdx.x + width];
    }
  }
  if (threadIdx.x == 0) {
    finish.norm.write(sums[0], *finish.inv_scale);
  }
  if (finish.scratch == nullptr || finish.scratch->seen == 0) {
    return;
  }
  for (std::int64_t i = threadIdx.x; i < finish.count_words; i += kFinishThreads) {
    finish.counts[i] = static_cast<std::int64_t>(finish.scratch->rows[0][i]);
  }
}

/// Addresses of the scratch: one fp64 per chunk, then the counts.
struct Scratch {
  at::DataPtr memory;
  double* partial;
  CountScratch* counts;
};

/// Of the caching allocator: reuse is ordered by the stream, under capture it is the graph's.
Scratch take_scratch(std::int64_t chunks, std::size_t rows, bool counted, cudaStream_t stream) {
  const auto sums = static_cast<std::size_t>(chunks) * sizeof(double);
  const auto words = (1 + 2 * rows) * sizeof(unsigned long long);
  Scratch scratch{c10::cuda::CUDACachingAllocator::get()->allocate(sums + (counted ? words : 0)),
                  nullptr, nullptr};
  scratch.partial = static_cast<double*>(scratch.memory.get());
  if (counted) {
    scratch.counts = reinterpret_cast<CountScratch*>(scratch.partial + chunks);
    C10_CUDA_CHECK(cudaMemsetAsync(scratch.counts, 0, words, stream));
  }
  return scratch;
}

}  // namespace

GradEntries gather_grads(at::TensorList grads, bool writes) {
  GradEntries list;
  list.entries.reserve(grads.size());
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& grad = grads[i];
    if (grad.numel() == 0) {
      continue;
    }
    const at::Tensor* dense = &grad;
    if (!grad.is_non_overlapping_and_dense()) {
      list.copies.push_back(grad.contiguous());
      list.copied.push_back(i);
      dense = &list.copies.back();
    }
    // What is only read must not materialise a copy-on-write tensor. The row's number stands in
    // for its address.
    void* data = writes ? dense->mutable_data_ptr() : const_cast<void*>(dense->const_data_ptr());
    list.entries.push_back({{data, nullptr, reinterpret_cast<void*>(i)},
                            grad.numel(),
                            static_cast<std::uint8_t>(grad.scalar_type())});
    list.chunks += chunk_count(grad.numel());
  }
  return list;
}

template <bool kWrites>
void launch_squares(GradEntries& list, std::size_t grads, const SquaresRequest& request) {
  const auto stream = at::cuda::getCurrentCUDAStream();
  const auto scratch = take_scratch(list.chunks, grads, request.counts != nullptr, stream);
  std::int64_t chunk = 0;
  for (auto& entry : list.entries) {
    const auto row = reinterpret_cast<std::uintptr_t>(entry.pointers[2]);
    entry.pointers[1] = scratch.partial + chunk;
    entry.pointers[2] = scratch.counts == nullptr ? nullptr : scratch.counts->rows[row];
    chunk += chunk_count(entry.numel);
  }
  multi_tensor_apply(list.entries,
                     SquaresOp<kWrites>{request.inv_scale, request.found_inf, scratch.counts});
  const Finish finish{scratch.partial,
                      list.chunks,
                      request.inv_scale,
                      request.norm,
                      scratch.counts,
                      request.counts,
                      static_cast<std::int64_t>(2 * grads)};
  launch(squares_finish_kernel, 1, kFinishThreads, stream, finish);
}

template void launch_squares<false>(GradEntries&, std::size_t, const SquaresRequest&);
template void launch_squares<true>(GradEntries&, std::size_t, const SquaresRequest&);

}  // namespace fastamp::kernels::cuda
