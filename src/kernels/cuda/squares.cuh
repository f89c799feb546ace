#pragma once

// A pass over gradients that adds up squares, and on the way unscales them if it writes.
//
// Layout: each dense gradient is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy. Mapping: a warp per run of chunks (launch_plan.h); lane l of it
// takes the vectors l, l + 32, ... of a chunk, 128 bits each, two in flight. Where the address is
// not on 16 bytes the same lane takes the same elements one by one, so the order of the sums is a
// function of the sizes alone. Each chunk leaves one fp64 in a scratch array; a second launch of
// one block adds them in a fixed order and writes the norm. Chunks with inf or NaN, which are rare,
// raise found_inf by a relaxed store and, where counts are asked for, add theirs to integers.
// Traffic per element: one read, and one write if it unscales; 8 bytes per 2048 elements of
// scratch, written and read. Numerics: kernels/functors/norm.h. fp64 throughput is ample on
// data-centre parts (on 8.6 and 8.9 two fp64 operations per element bound 16-bit gradients to about
// 0.3e12 elements per second).

#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/functors/norm.h"
#include "kernels/functors/unscale.h"

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cuda/atomic>

#include <type_traits>

namespace fastamp::kernels::cuda {

static_assert(kNormChunkNumel == kChunkNumel);

inline constexpr unsigned kAllLanes = 0xffffffffU;

/// Counts of a call in scratch memory: zero before it.
struct CountScratch {
  unsigned long long seen;  ///< Not 0: some element was not finite.
  unsigned long long rows[1][2];
};

/// 128 bits of elements, moved by one instruction.
template <typename scalar_t>
struct alignas(16) GradVec {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(scalar_t));
  scalar_t lanes[kSize];
};

/// What a lane knows of a chunk.
struct LaneSums {
  double squares = 0.0;
  unsigned inf_and_nan = 0;  ///< Counts in the two halves: a chunk has 2048 elements.

  template <typename opmath_t>
  __device__ __forceinline__ void count(opmath_t grad) {
    if (is_non_finite(grad)) {
      inf_and_nan += magnitude_bits(grad) == kInfBits<opmath_t> ? 1U : 1U << 16U;
    }
  }

  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (unsigned step = kWarpSize / 2; step > 0; step /= 2) {
      squares += __shfl_down_sync(kAllLanes, squares, step);
    }
  }
  __device__ __forceinline__ unsigned counts_of_lanes() const {
    unsigned counts = inf_and_nan;
#pragma unroll
    for (unsigned step = kWarpSize / 2; step > 0; step /= 2) {
      counts += __shfl_down_sync(kAllLanes, counts, step);
    }
    return counts;
  }
};

/// Lists of an entry: gradient, scratch for the sums of its chunks, its row of counts or null.
template <bool kWrites>
struct SquaresOp {
  /// Reading takes 42 registers, and with 32 spills; 48 KiB in flight per processor.
  static constexpr int kThreads = kWrites ? 1024 : 1536;

  const float* inv_scale;
  float* found_inf;
  CountScratch* scratch;  ///< Null: counts are not asked for.

  struct Thread {
    float inv_scale;
  };

  __device__ Thread begin() const { return {kWrites ? *inv_scale : 1.0F}; }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void range(Thread& thread, const Table& table, const ChunkRange& range,
                        int lane) const {
    void* base = table.pointer(0, range.entry);
    auto* partial = static_cast<double*>(table.pointer(1, range.entry));
    auto* row = static_cast<unsigned long long*>(table.pointer(2, range.entry));
    // Read from memory, the pointer has lost its address space, and generic accesses are slower.
    __builtin_assume(__isGlobal(base));
    const float factor = thread.inv_scale;
    switch (static_cast<at::ScalarType>(packed_tag(table.packed[range.entry]))) {
      case at::kFloat:
        return run(static_cast<float*>(base), partial, row, factor, range, lane);
      case at::kHalf:
        return run(static_cast<c10::Half*>(base), partial, row, factor, range, lane);
      case at::kDouble:
        if constexpr (kWrites) {
          run(static_cast<double*>(base), partial, row, factor, range, lane);
        }
        return;
      default:
        return run(static_cast<c10::BFloat16*>(base), partial, row, factor, range, lane);
    }
  }

 private:
  template <typename scalar_t>
  __device__ __forceinline__ void run(scalar_t* base, double* partial, unsigned long long* row,
                                      float factor, const ChunkRange& range, int lane) const {
#pragma unroll 1
    for (std::int64_t at = range.begin; at < range.end; at += kNormChunkNumel) {
      const std::int64_t rest = range.end - at;
      const auto n = static_cast<int>(rest < kNormChunkNumel ? rest : kNormChunkNumel);
      LaneSums sums = chunk(base + at, n, lane, factor);
      const bool counted = __any_sync(kAllLanes, sums.inf_and_nan != 0) != 0;
      sums.add_lanes();
      if (lane == 0) {
        partial[at / kNormChunkNumel] = sums.squares;
      }
      const double total = __shfl_sync(kAllLanes, sums.squares, 0);
      if (kWrites ? counted : is_non_finite(total)) {
        report(kWrites ? sums : recount(base + at, n, lane), row, lane);
      }
    }
  }

  /// All elements of a chunk that are this lane's.
  template <typename scalar_t>
  static __device__ __forceinline__ LaneSums chunk(scalar_t* data, int n, int lane, float factor) {
    constexpr int kVec = GradVec<scalar_t>::kSize;
    const int vector_count = n / kVec;
    LaneSums sums;
    if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {
      auto* vectors = reinterpret_cast<GradVec<scalar_t>*>(data);
      int i = lane;
#pragma unroll 1
      for (; i + kWarpSize < vector_count; i += 2 * kWarpSize) {
        GradVec<scalar_t> a = vectors[i];
        GradVec<scalar_t> b = vectors[i + kWarpSize];
        vector(sums, a, factor);
        vector(sums, b, factor);
        store(vectors + i, a, factor);
        store(vectors + i + kWarpSize, b, factor);
      }
      if (i < vector_count) {
        GradVec<scalar_t> a = vectors[i];
        vector(sums, a, factor);
        store(vectors + i, a, factor);
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < vector_count; i += kWarpSize) {
#pragma unroll 1
        for (int k = 0; k < kVec; ++k) {
          single(sums, data + i * kVec + k, factor);
        }
      }
    }
    const int tail = vector_count * kVec + lane;
    if (tail < n) {
      single(sums, data + tail, factor);
    }
    return sums;
  }

  template <typename scalar_t>
  static __device__ __forceinline__ void visit(LaneSums& sums, scalar_t& element, float factor) {
    using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto grad = static_cast<opmath_t>(element);
    sums.squares += square(grad);
    if constexpr (kWrites) {
      sums.count(grad);
      element = static_cast<scalar_t>(Unscale<opmath_t>{static_cast<opmath_t>(factor)}(grad));
    }
  }

  template <typename scalar_t>
  static __device__ __forceinline__ void vector(LaneSums& sums, GradVec<scalar_t>& vec,
                                                float factor) {
#pragma unroll
    for (int k = 0; k < GradVec<scalar_t>::kSize; ++k) {
      visit(sums, vec.lanes[k], factor);
    }
  }

  template <typename T>
  static __device__ __forceinline__ void store(T* to, const T& value, float factor) {
    if (kWrites && Unscale<float>{factor}.rewrites()) {
      *to = value;
    }
  }

  template <typename scalar_t>
  static __device__ __forceinline__ void single(LaneSums& sums, scalar_t* at, float factor) {
    scalar_t element = *at;
    visit(sums, element, factor);
    store(at, element, factor);
  }

  /// Counts a chunk that was only read, and is still there.
  template <typename scalar_t>
  static __device__ __forceinline__ LaneSums recount(const scalar_t* data, int n, int lane) {
    LaneSums sums;
#pragma unroll 1
    for (int i = lane; i < n; i += kWarpSize) {
      sums.count(static_cast<float>(data[i]));
    }
    return sums;
  }

  /// By a whole warp. Relaxed: who reads what is stored here comes after the kernel.
  __device__ __forceinline__ void report(const LaneSums& sums, unsigned long long* row,
                                         int lane) const {
    const unsigned counts = sums.counts_of_lanes();
    if (lane != 0) {
      return;
    }
    ::cuda::atomic_ref<float, ::cuda::thread_scope_device>(*found_inf)
        .store(1.0F, ::cuda::memory_order_relaxed);
    if (scratch != nullptr) {
      atomicExch(&scratch->seen, 1ULL);
      atomicAdd(row, static_cast<unsigned long long>(counts & 0xffffU));
      atomicAdd(row + 1, static_cast<unsigned long long>(counts >> 16U));
    }
  }
};

}  // namespace fastamp::kernels::cuda
