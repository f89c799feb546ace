// SPDX-License-Identifier: Apache-2.0
#pragma once

// A pass over gradients that adds up squares, and on the way unscales them if it writes.
//
// Layout: each dense gradient is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy. Mapping: a warp per run of chunks (launch_plan.h); lane l of it
// takes the vectors l, l + 32, ... of a chunk, 128 bits each, two in flight. Where the address is
// not on 16 bytes the same lane loads the same elements one at a time, all of a vector before the
// first is used (the loads of a vector share their lines, which are fetched once); and the runs are
// a function of the number of chunks. So the order of the sums is a function of the sizes alone.
// Each run leaves one fp64 in scratch memory; the last block (last_block.cuh) adds them in a fixed
// order and writes the norm: one launch for everything. Chunks with inf or NaN, read or as products
// with inv_scale, which are rare, raise a word that rests at zero (zeroed_workspace.h) and, where
// counts are asked for, add theirs to integers that do; if there were any, the last block moves
// them to where they were asked for.
// It writes found_inf too: 0 or 1 if the flag is to be overwritten, else 1 or nothing.
// Traffic per element: one read, and one write if it unscales; at most 512 KiB of scratch, written
// and read. Numerics: kernels/functors/norm.h. fp64 throughput is ample on data-centre parts (on
// 8.6 and 8.9 two fp64 operations per element bound 16-bit gradients to about 0.3e12 elements per
// second).

#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/functors/norm.h"
#include "kernels/functors/unscale.h"

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cuda/atomic>

#include <cstddef>
#include <type_traits>

namespace fastamp::kernels::cuda {

static_assert(kNormChunkNumel == kSumChunkNumel);

inline constexpr unsigned kAllLanes = 0xffffffffU;

/// Memory that is zero before a call: the count of arrived blocks and, if requested, the counts,
/// two for each gradient, which lie behind this.
struct alignas(alignof(unsigned long long)) SquaresZeros {
  unsigned arrivals;
  unsigned seen;  ///< Not 0: some element is not finite.

  FASTAMP_HOST_DEVICE unsigned long long* row(std::size_t i) {
    return reinterpret_cast<unsigned long long*>(this + 1) + 2 * i;
  }
};

constexpr std::size_t squares_zeros_bytes(std::size_t rows) {
  return sizeof(SquaresZeros) + 2 * rows * sizeof(unsigned long long);
}

/// 128 bits of elements, moved by one instruction.
template <typename scalar_t>
struct alignas(16) GradVec {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(scalar_t));
  scalar_t lanes[kSize];
};

/// Sums of a lane over its part of a range.
struct LaneSums {
  double squares = 0.0;
  unsigned inf = 0;
  unsigned nan = 0;

  /// Counts as NonFinite::count() of functors/unscale.h.
  template <typename opmath_t>
  __device__ __forceinline__ void count(opmath_t grad, bool overflows) {
    if (overflows) {
      const bool is_nan = magnitude_bits(grad) > kInfBits<opmath_t>;
      inf += is_nan ? 0U : 1U;
      nan += is_nan ? 1U : 0U;
    }
  }
  __device__ __forceinline__ bool counted() const { return (inf | nan) != 0; }
};

/// Lists of an entry: gradient, its row of counts or null.
template <bool kWrites>
struct SquaresOp {
  static constexpr std::int64_t kChunkNumel = kSumChunkNumel;
  static constexpr std::uint32_t kMaxRuns = kMaxSumRuns;
  /// Reading takes 48 registers, and with 40 spills; 40 KiB in flight per processor.
  static constexpr int kThreads = kWrites ? 1024 : 1280;

  const float* inv_scale;
  float* found_inf;
  double* partial;  ///< The sum of each run; on 16 bytes.
  std::uint32_t runs;
  unsigned* arrivals;
  SquaresZeros* zeros;   ///< Where arrivals are, and counts.
  std::int64_t* counts;  ///< Null: not asked for.
  std::int64_t count_words;
  NormResults norm;
  bool overwrite_found_inf;

  struct Thread {
    float inv_scale;
    double squares;  ///< Of the run at hand.
  };

  __device__ Thread begin() const { return {kWrites ? *inv_scale : 1.0F, 0.0}; }
  __device__ void end(Thread& /*thread*/) const {}

  __device__ void end_run(Thread& thread, std::uint32_t run, int lane) const {
    double sum = thread.squares;
#pragma unroll
    for (unsigned step = kWarpSize / 2; step > 0; step /= 2) {
      sum += __shfl_down_sync(kAllLanes, sum, step);
    }
    if (lane == 0) {
      partial[run] = sum;
    }
    thread.squares = 0.0;
  }

  /// Thread t adds the pairs t, t + 256, ... of runs; then the threads are added pairwise.
  template <typename Table>
  __device__ void finish(const Table& /*table*/) const {
    __shared__ double sums[kBlockThreads];
    double sum = 0.0;
    // Loads of one block, with nobody beside it: without this many in flight their latencies add
    // up to half of what the whole pass takes (measured on an H200).
    constexpr std::uint32_t kInFlight = 4;
    const auto* pairs = reinterpret_cast<const double2*>(partial);
    const std::uint32_t count = runs / 2;
#pragma unroll 1
    for (std::uint32_t first = threadIdx.x; first < count; first += kInFlight * kBlockThreads) {
      double2 loaded[kInFlight];
#pragma unroll
      for (std::uint32_t k = 0; k < kInFlight; ++k) {
        const std::uint32_t i = first + k * kBlockThreads;
        loaded[k] = i < count ? __ldcg(pairs + i) : double2{0.0, 0.0};
      }
#pragma unroll
      for (std::uint32_t k = 0; k < kInFlight; ++k) {
        sum += loaded[k].x;
        sum += loaded[k].y;
      }
    }
    if (threadIdx.x == 0 && runs % 2 != 0) {
      sum += __ldcg(partial + runs - 1);
    }
    sums[threadIdx.x] = sum;
    for (unsigned width = kBlockThreads / 2; width > 0; width /= 2) {
      __syncthreads();
      if (threadIdx.x < width) {
        sums[threadIdx.x] += sums[threadIdx.x + width];
      }
    }
    bool non_finite = __ldcg(&zeros->seen) != 0;
    if (threadIdx.x == 0) {
      non_finite |= !norm.write(sums[0], *inv_scale);
    }
    write_found_inf(__syncthreads_or(static_cast<int>(non_finite)) != 0);
  }

  template <typename Table>
  __device__ void range(Thread& thread, const Table& table, const ChunkRange& range,
                        int lane) const {
    void* base = table.pointer(0, range.entry);
    auto* row = static_cast<unsigned long long*>(table.pointer(1, range.entry));
    // Read from memory, the pointer has lost its address space, and generic accesses are slower.
    __builtin_assume(__isGlobal(base));
    switch (static_cast<at::ScalarType>(packed_tag(table.packed[range.entry]))) {
      case at::kFloat:
        return run(thread, static_cast<float*>(base), row, range, lane);
      case at::kHalf:
        return run(thread, static_cast<c10::Half*>(base), row, range, lane);
      case at::kDouble:
        if constexpr (kWrites) {
          run(thread, static_cast<double*>(base), row, range, lane);
        }
        return;
      default:
        return run(thread, static_cast<c10::BFloat16*>(base), row, range, lane);
    }
  }

 private:
  template <typename scalar_t>
  __device__ __forceinline__ void run(Thread& thread, scalar_t* base, unsigned long long* row,
                                      const ChunkRange& range, int lane) const {
    LaneSums sums;
#pragma unroll 1
    for (std::int64_t at = range.begin; at < range.end; at += kNormChunkNumel) {
      const std::int64_t remainder = range.end - at;
      const auto n = static_cast<int>(remainder < kNormChunkNumel ? remainder : kNormChunkNumel);
      chunk(sums, base + at, n, lane, thread.inv_scale);
    }
    thread.squares += sums.squares;
    if constexpr (!kWrites) {
      // Read here: no register is kept for it through the loops.
      const bool safe = is_safe(sums.squares, safe_squares(*inv_scale));
      if (__any_sync(kAllLanes, static_cast<int>(!safe)) == 0) {
        return;
      }
      recount(sums, base, range, lane);
    }
    if (__any_sync(kAllLanes, static_cast<int>(sums.counted())) != 0) {
      report(sums, row, lane);
    }
  }

  /// All elements of a chunk that are this lane's.
  template <typename scalar_t>
  static __device__ __forceinline__ void chunk(LaneSums& sums, scalar_t* data, int n, int lane,
                                               float factor) {
    constexpr int kVec = GradVec<scalar_t>::kSize;
    const int vector_count = n / kVec;
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
        apart(sums, data + i * kVec, factor);
      }
    }
    const int tail = vector_count * kVec + lane;
    if (tail < n) {
      single(sums, data + tail, factor);
    }
  }

  template <typename scalar_t>
  static __device__ __forceinline__ void visit(LaneSums& sums, scalar_t& element, float factor) {
    using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto grad = static_cast<opmath_t>(element);
    sums.squares += square(grad);
    if constexpr (kWrites) {
      const opmath_t product = Unscale<opmath_t>{static_cast<opmath_t>(factor)}(grad);
      sums.count(grad, magnitude_bits(product) >= kOverflowBits<scalar_t>);
      element = static_cast<scalar_t>(product);
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

  /// A vector that no single access may move.
  template <typename scalar_t>
  static __device__ __forceinline__ void apart(LaneSums& sums, scalar_t* at, float factor) {
    GradVec<scalar_t> vec;
#pragma unroll
    for (int k = 0; k < GradVec<scalar_t>::kSize; ++k) {
      vec.lanes[k] = at[k];
    }
    vector(sums, vec, factor);
#pragma unroll
    for (int k = 0; k < GradVec<scalar_t>::kSize; ++k) {
      store(at + k, vec.lanes[k], factor);
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

  /// Counts a range that was only read, so that its values are still there. A step that reads them
  /// takes the products in fp32.
  template <typename scalar_t>
  __device__ __forceinline__ void recount(LaneSums& sums, const scalar_t* base,
                                          const ChunkRange& range, int lane) const {
    const Unscale<float> unscale{*inv_scale};
#pragma unroll 1
    for (std::int64_t i = range.begin + lane; i < range.end; i += kWarpSize) {
      const auto grad = static_cast<float>(base[i]);
      sums.count(grad, is_non_finite(unscale(grad)));
    }
  }

  /// Called by a whole warp. Relaxed: all of it is read by the last block.
  __device__ __forceinline__ void report(const LaneSums& sums, unsigned long long* row,
                                         int lane) const {
    if (lane == 0) {
      atomicExch(&zeros->seen, 1U);
    }
    if (row != nullptr && sums.counted()) {
      atomicAdd(row, static_cast<unsigned long long>(sums.inf));
      atomicAdd(row + 1, static_cast<unsigned long long>(sums.nan));
    }
  }

  /// Called by the last block: hands flag and counts out and leaves zeros.
  __device__ __forceinline__ void write_found_inf(bool non_finite) const {
    if (threadIdx.x == 0 && (non_finite || overwrite_found_inf)) {
      *found_inf = non_finite ? 1.0F : 0.0F;
    }
    if (!non_finite) {
      return;
    }
    if (counts != nullptr) {
      move_counts();
    }
    __syncthreads();  // all threads have read `seen`
    if (threadIdx.x == 0) {
      zeros->seen = 0;
    }
  }

  __device__ __forceinline__ void move_counts() const {
#pragma unroll 1
    for (std::int64_t i = threadIdx.x; i < count_words; i += kBlockThreads) {
      unsigned long long* const word = zeros->row(0) + i;
      counts[i] = static_cast<std::int64_t>(__ldcg(word));
      *word = 0;
    }
  }
};

}  // namespace fastamp::kernels::cuda
