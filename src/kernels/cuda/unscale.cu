// SPDX-License-Identifier: Apache-2.0
// CUDA kernel of fastamp::unscale_and_check_.
//
// Layout: each dense gradient is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy that joins the same launch and is copied back. Mapping: a warp per
// run of chunks (launch_plan.h); its lanes take neighbouring 128-bit vectors, two in flight each
// (64 KiB per processor, above what latency times bandwidth needs), with a scalar head up to the
// first 16-byte boundary and a scalar tail. Traffic per element: one read and, unless inv_scale is
// 1, one write. Numerics: kernels/functors/unscale.h, so independent of the launch shape.
// found_inf: one relaxed store per block that wrote a non-finite element; all store the same 1.
// With the norm or the counts asked for, or a flag to be overwritten, which takes a last block, the
// pass is that of kernels/cuda/squares.cuh.

#include "kernels/amp_args.h"
#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/cuda/squares_launch.h"
#include "kernels/functors/unscale.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>

#include <cuda/atomic>

#include <vector>

namespace fastamp::kernels {
namespace {

template <typename scalar_t>
using opmath_for = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

/// 128 bits of elements, moved by one instruction.
template <typename scalar_t>
struct alignas(16) Vec {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(scalar_t));
  scalar_t lanes[kSize];
};

template <typename scalar_t>
__device__ __forceinline__ void unscale_one(scalar_t& element, float inv_scale, bool& non_finite) {
  using opmath_t = opmath_for<scalar_t>;
  const Unscale<opmath_t> unscale{static_cast<opmath_t>(inv_scale)};
  // What is written shows what was read: no factor makes inf or NaN finite.
  const opmath_t product = unscale(static_cast<opmath_t>(element));
  non_finite |= magnitude_bits(product) >= kOverflowBits<scalar_t>;
  element = static_cast<scalar_t>(product);
}

struct UnscaleOp {
  const float* inv_scale;
  float* found_inf;

  struct Thread {
    float inv_scale;
    bool non_finite;
  };

  __device__ Thread begin() const { return {*inv_scale, false}; }

  template <typename Table>
  __device__ void range(Thread& thread, const Table& table, const cuda::ChunkRange& range,
                        int lane) const {
    void* base = table.pointer(0, range.entry);
    // Read from memory, the pointer has lost its address space, and generic accesses are slower.
    __builtin_assume(__isGlobal(base));
    switch (static_cast<at::ScalarType>(cuda::packed_tag(table.packed[range.entry]))) {
      case at::kFloat:
        return run(thread, static_cast<float*>(base), range, lane);
      case at::kHalf:
        return run(thread, static_cast<c10::Half*>(base), range, lane);
      case at::kBFloat16:
        return run(thread, static_cast<c10::BFloat16*>(base), range, lane);
      default:
        return run(thread, static_cast<double*>(base), range, lane);
    }
  }

  __device__ void end(Thread& thread) const {
    if (__syncthreads_or(static_cast<int>(thread.non_finite)) != 0 && threadIdx.x == 0) {
      ::cuda::atomic_ref<float, ::cuda::thread_scope_device>(*found_inf)
          .store(1.0F, ::cuda::memory_order_relaxed);
    }
  }

 private:
  template <typename scalar_t>
  static __device__ __forceinline__ void scalar(Thread& thread, scalar_t* at) {
    scalar_t element = *at;
    unscale_one(element, thread.inv_scale, thread.non_finite);
    if (Unscale<float>{thread.inv_scale}.rewrites()) {
      *at = element;
    }
  }

  template <typename scalar_t>
  static __device__ __forceinline__ void update(Thread& thread, Vec<scalar_t>& vec) {
#pragma unroll
    for (int k = 0; k < Vec<scalar_t>::kSize; ++k) {
      unscale_one(vec.lanes[k], thread.inv_scale, thread.non_finite);
    }
  }

  template <typename scalar_t>
  static __device__ __forceinline__ void run(Thread& thread, scalar_t* base,
                                             const cuda::ChunkRange& range, int lane) {
    constexpr int kVec = Vec<scalar_t>::kSize;
    const bool rewrites = Unscale<float>{thread.inv_scale}.rewrites();
    scalar_t* data = base + range.begin;
    std::int64_t n = range.end - range.begin;
    const auto past =
        static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % 16 / sizeof(scalar_t));
    const std::int64_t head = past == 0 ? 0 : min(static_cast<std::int64_t>(kVec - past), n);
    if (lane < head) {
      scalar(thread, data + lane);
    }
    data += head;
    n -= head;
    auto* vectors = reinterpret_cast<Vec<scalar_t>*>(data);
    const std::int64_t vector_count = n / kVec;
    std::int64_t i = lane;
#pragma unroll 1  // unrolled further, the kernel no longer fits the registers of full occupancy
    for (; i + cuda::kWarpSize < vector_count; i += 2 * cuda::kWarpSize) {
      Vec<scalar_t> a = vectors[i];
      Vec<scalar_t> b = vectors[i + cuda::kWarpSize];
      update(thread, a);
      update(thread, b);
      if (rewrites) {
        vectors[i] = a;
        vectors[i + cuda::kWarpSize] = b;
      }
    }
    if (i < vector_count) {
      Vec<scalar_t> a = vectors[i];
      update(thread, a);
      if (rewrites) {
        vectors[i] = a;
      }
    }
    const std::int64_t tail = vector_count * kVec + lane;
    if (tail < n) {
      scalar(thread, data + tail);
    }
  }
};

void unscale_only(const UnscaleArgs& args, const cuda::DenseGrads& list) {
  std::vector<cuda::TensorEntry<1>> entries;
  entries.reserve(list.grads.size());
  for (const auto& grad : list.grads) {
    entries.push_back({{grad.data}, grad.numel, static_cast<std::uint8_t>(grad.dtype)});
  }
  cuda::multi_tensor_apply(entries, UnscaleOp{args.inv_scale.const_data_ptr<float>(),
                                              args.found_inf.mutable_data_ptr<float>()});
}

}  // namespace

void unscale_and_check_cuda(const UnscaleArgs& args) {
  const c10::cuda::CUDAGuard guard(args.inv_scale.device());
  // The op has no autograd kernel; the copies of strided gradients must not be recorded either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto list = cuda::gather_grads(args.grads, /*writes=*/true);
  if (given(args.sum_of_squares) || given(args.non_finite_counts) || args.overwrite_found_inf) {
    cuda::unscale_and_sum_squares(
        list, {args.inv_scale.const_data_ptr<float>(), args.found_inf.mutable_data_ptr<float>(),
               mutable_pointer<std::int64_t>(args.non_finite_counts), norm_results(args),
               args.overwrite_found_inf});
  } else {
    unscale_only(args, list);
  }
  for (std::size_t i = 0; i < list.copies.size(); ++i) {
    args.grads[list.copied[i]].copy_(list.copies[i]);
  }
}

}  // namespace fastamp::kernels
