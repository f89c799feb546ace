// CUDA kernels of fastamp::norm_and_check_.
//
// Layout: each dense gradient is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy. Mapping: a warp per run of chunks (launch_plan.h); lane l of it
// takes the vectors l, l + 32, ... of a chunk, 128 bits each, two in flight. Where the address is
// not on 16 bytes the same lane reads the same elements one by one, so the order of the sums is a
// function of the sizes alone. Each chunk leaves one fp64 in a scratch array; a second launch of
// one block adds them in a fixed order, sets the flag and writes the norm. No atomics.
// Traffic per element: one read; 8 bytes per 2048 elements of scratch, written and read.
// Numerics: kernels/functors/norm.h. fp64 throughput is ample on data-centre parts (on 8.6 and 8.9
// two fp64 operations per element bound 16-bit gradients to about 0.3e12 elements per second).

#include "kernels/amp_checks.h"
#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/functors/norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <vector>

namespace fastamp::kernels {
namespace {

static_assert(kNormChunkNumel == cuda::kChunkNumel);

constexpr unsigned kFinishThreads = 1024;
constexpr unsigned kAllLanes = 0xffffffffU;

/// 128 bits of elements, moved by one instruction.
template <typename scalar_t>
struct alignas(16) Vec {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(scalar_t));
  scalar_t lanes[kSize];
};

template <typename scalar_t>
__device__ __forceinline__ void add_vector(double& sum, const Vec<scalar_t>& vec) {
#pragma unroll
  for (int k = 0; k < Vec<scalar_t>::kSize; ++k) {
    sum += square(static_cast<float>(vec.lanes[k]));
  }
}

template <typename scalar_t>
__device__ __forceinline__ double lane_sum(const scalar_t* data, int n, int lane) {
  constexpr int kVec = Vec<scalar_t>::kSize;
  const int vector_count = n / kVec;
  double sum = 0.0;
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {
    const auto* vectors = reinterpret_cast<const Vec<scalar_t>*>(data);
    int i = lane;
#pragma unroll 1
    for (; i + cuda::kWarpSize < vector_count; i += 2 * cuda::kWarpSize) {
      const Vec<scalar_t> a = vectors[i];
      const Vec<scalar_t> b = vectors[i + cuda::kWarpSize];
      add_vector(sum, a);
      add_vector(sum, b);
    }
    if (i < vector_count) {
      add_vector(sum, vectors[i]);
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < vector_count; i += cuda::kWarpSize) {
#pragma unroll 1
      for (int k = 0; k < kVec; ++k) {
        sum += square(static_cast<float>(data[i * kVec + k]));
      }
    }
  }
  const int tail = vector_count * kVec + lane;
  if (tail < n) {
    sum += square(static_cast<float>(data[tail]));
  }
  return sum;
}

/// Lists of an entry: gradient, scratch for the sums of its chunks, its own flag or null.
struct NormOp {
  /// 42 registers; with 32 the kernel spills. 48 KiB in flight per processor.
  static constexpr int kThreads = 1536;

  struct Thread {};

  __device__ Thread begin() const { return {}; }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void range(Thread& /*thread*/, const Table& table, const cuda::ChunkRange& range,
                        int lane) const {
    void* base = table.pointer(0, range.entry);
    auto* partial = static_cast<double*>(table.pointer(1, range.entry));
    auto* flag = static_cast<float*>(table.pointer(2, range.entry));
    // Read from memory, the pointer has lost its address space, and generic accesses are slower.
    __builtin_assume(__isGlobal(base));
    switch (static_cast<at::ScalarType>(cuda::packed_tag(table.packed[range.entry]))) {
      case at::kFloat:
        return run(static_cast<const float*>(base), partial, flag, range, lane);
      case at::kHalf:
        return run(static_cast<const c10::Half*>(base), partial, flag, range, lane);
      default:
        return run(static_cast<const c10::BFloat16*>(base), partial, flag, range, lane);
    }
  }

 private:
  template <typename scalar_t>
  static __device__ __forceinline__ void run(const scalar_t* base, double* partial, float* flag,
                                             const cuda::ChunkRange& range, int lane) {
#pragma unroll 1
    for (std::int64_t at = range.begin; at < range.end; at += kNormChunkNumel) {
      const std::int64_t rest = range.end - at;
      const auto n = static_cast<int>(rest < kNormChunkNumel ? rest : kNormChunkNumel);
      double sum = lane_sum(base + at, n, lane);
#pragma unroll
      for (int step = cuda::kWarpSize / 2; step > 0; step /= 2) {
        sum += __shfl_down_sync(kAllLanes, sum, static_cast<unsigned>(step));
      }
      if (lane == 0) {
        partial[at / kNormChunkNumel] = sum;
        if (flag != nullptr && is_non_finite(sum)) {
          *flag = 1.0F;
        }
      }
    }
  }
};

/// One block: thread t adds the sums t, t + 1024, ...; then the threads are added pairwise.
__global__ void __launch_bounds__(kFinishThreads)
    norm_finish_kernel(const double* partial, std::int64_t count, const float* inv_scale,
                       float* found_inf, double* sum_of_squares) {
  __shared__ double sums[kFinishThreads];
  double sum = 0.0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < count; i += kFinishThreads) {
    sum += partial[i];
  }
  sums[threadIdx.x] = sum;
  for (unsigned width = kFinishThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) {
      sums[threadIdx.x] += sums[threadIdx.x + width];
    }
  }
  if (threadIdx.x == 0) {
    if (is_non_finite(sums[0])) {
      *found_inf = 1.0F;
    }
    *sum_of_squares = unscaled_sum_of_squares(sums[0], *inv_scale);
  }
}

struct Gathered {
  std::vector<cuda::TensorEntry<3>> entries;
  std::vector<at::Tensor> copies;
  std::int64_t chunks = 0;
};

/// Entries with chunk numbers where the scratch addresses will be: its size is not known before.
Gathered gather(at::TensorList grads, float* flags) {
  Gathered list;
  list.entries.reserve(grads.size());
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& grad = grads[i];
    if (grad.numel() == 0) {
      continue;
    }
    const void* data = nullptr;
    if (grad.is_non_overlapping_and_dense()) {
      data = grad.const_data_ptr();
    } else {
      list.copies.push_back(grad.contiguous());
      data = list.copies.back().const_data_ptr();
    }
    list.entries.push_back(
        {{const_cast<void*>(data), nullptr, flags == nullptr ? flags : flags + i},
         grad.numel(),
         static_cast<std::uint8_t>(grad.scalar_type())});
    list.chunks += cuda::chunk_count(grad.numel());
  }
  return list;
}

void norm_and_check_cuda(at::TensorList grads, const at::Tensor& inv_scale,
                         const at::Tensor& found_inf, const at::Tensor& sum_of_squares,
                         const std::optional<at::Tensor>& per_tensor_found_inf) {
  check_norm_args(grads, inv_scale, found_inf, sum_of_squares, per_tensor_found_inf);
  const c10::cuda::CUDAGuard guard(inv_scale.device());
  // The op has no autograd kernel; the copies of strided gradients must not be recorded either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool has_flags = per_tensor_found_inf && per_tensor_found_inf->defined();
  auto list = gather(grads, has_flags ? per_tensor_found_inf->mutable_data_ptr<float>() : nullptr);
  // Of the caching allocator: reuse is ordered by the stream, under capture it is the graph's.
  const auto scratch = c10::cuda::CUDACachingAllocator::get()->allocate(
      static_cast<std::size_t>(list.chunks) * sizeof(double));
  auto* partial = static_cast<double*>(scratch.get());
  std::int64_t chunk = 0;
  for (auto& entry : list.entries) {
    entry.pointers[1] = partial + chunk;
    chunk += cuda::chunk_count(entry.numel);
  }
  cuda::multi_tensor_apply(list.entries, NormOp{});
  cuda::launch(norm_finish_kernel, 1, kFinishThreads, at::cuda::getCurrentCUDAStream(), partial,
               list.chunks, inv_scale.const_data_ptr<float>(), found_inf.mutable_data_ptr<float>(),
               sum_of_squares.mutable_data_ptr<double>());
}

}  // namespace
}  // namespace fastamp::kernels

TORCH_LIBRARY_IMPL(fastamp, CUDA, m) {
  m.impl("norm_and_check_", fastamp::kernels::norm_and_check_cuda);
}
