// SPDX-License-Identifier: Apache-2.0
#pragma once

// First pass of a cast to fp8: the scale of each tensor of a list.
//
// Layout: dense tensors as flat arrays. Mapping: a warp per run of chunks (launch_plan.h); its
// lanes take neighbouring 128-bit vectors, two in flight each, with a scalar head up to the first
// 16-byte boundary and a scalar tail. A warp carries the magnitudes of one tensor; a block hands
// those of neighbouring warps of one tensor on together, so that a large tensor costs one atomic
// per block. Traffic per element: one read; 16 bytes per tensor beside it. Numerics: maxima of the
// bits of float32 magnitudes (kernels/functors/float8.h), so that no order matters. They are
// collected in memory that rests at zero (zeroed_workspace.h); the last block (last_block.cuh)
// makes the scales of them and sets them back. Proof: docs/cuda.md.

#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/functors/float8.h"

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>

namespace fastamp::kernels::cuda {

/// Facts that the second pass has to know of a tensor.
struct Float8Scale {
  float scale;
  std::uint32_t is_finite;
};

/// Tags of entries: what is cast, and to what.
constexpr std::uint16_t float8_tag(at::ScalarType from, at::ScalarType to) {
  return static_cast<std::uint16_t>(static_cast<unsigned>(from) | static_cast<unsigned>(to) << 8U);
}
FASTAMP_HOST_DEVICE at::ScalarType tagged_source(std::uint16_t tag) {
  return static_cast<at::ScalarType>(tag & 0xffU);
}
FASTAMP_HOST_DEVICE at::ScalarType tagged_format(std::uint16_t tag) {
  return static_cast<at::ScalarType>(tag >> 8U);
}

/// Memory that is zero before a call: the count of arrived blocks, and behind it the magnitudes of
/// each entry.
struct alignas(8) Float8Zeros {
  unsigned arrivals;

  FASTAMP_HOST_DEVICE Float8Magnitudes* magnitudes(std::int32_t entry) {
    return reinterpret_cast<Float8Magnitudes*>(this + 1) + entry;
  }
};

constexpr std::size_t float8_zeros_bytes(std::size_t entries) {
  return sizeof(Float8Zeros) + entries * sizeof(Float8Magnitudes);
}

/// Lists of an entry: tensor, its Float8Scale, its inverse scale.
struct Float8RangeOp {
  unsigned* arrivals;
  Float8Zeros* zeros;  ///< Where arrivals are.

  struct Thread {
    std::int32_t entry;  ///< Whose magnitudes these are; less than 0: no entry's.
    Float8Magnitudes seen;
  };

  __device__ Thread begin() const { return {-1, {}}; }

  template <typename Table>
  __device__ void range(Thread& thread, const Table& table, const ChunkRange& range,
                        int lane) const {
    if (thread.entry != range.entry) {  // the same for all lanes
      join_lanes(thread.seen);
      if (lane == 0) {
        hand_on(thread);
      }
      thread = {range.entry, {}};
    }
    void* base = table.pointer(0, range.entry);
    // Read from memory, the pointer has lost its address space, and generic accesses are slower.
    __builtin_assume(__isGlobal(base));
    switch (tagged_source(packed_tag(table.packed[range.entry]))) {
      case at::kFloat:
        return run(thread.seen, static_cast<const float*>(base), range, lane);
      case at::kHalf:
        return run(thread.seen, static_cast<const c10::Half*>(base), range, lane);
      default:
        return run(thread.seen, static_cast<const c10::BFloat16*>(base), range, lane);
    }
  }

  /// Entries follow one another from warp to warp, so those of one entry are neighbours.
  __device__ void end(Thread& thread) const {
    __shared__ Thread warps[kBlockWarps];
    join_lanes(thread.seen);
    if (threadIdx.x % kWarpSize == 0) {
      warps[threadIdx.x / kWarpSize] = thread;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Thread joined = warps[0];
#pragma unroll 1
      for (int i = 1; i < kBlockWarps; ++i) {
        if (warps[i].entry != joined.entry) {
          hand_on(joined);
          joined = {warps[i].entry, {}};
        }
        joined.seen.include(warps[i].seen);
      }
      hand_on(joined);
    }
  }

  template <typename Table>
  __device__ void finish(const Table& table) const {
#pragma unroll 1
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < table.count; i += kBlockThreads) {
      Float8Magnitudes* const magnitudes = zeros->magnitudes(i);
      const Float8Magnitudes seen{__ldcg(&magnitudes->amax), __ldcg(&magnitudes->largest)};
      const bool is_e4m3 = tagged_format(packed_tag(table.packed[i])) == at::kFloat8_e4m3fn;
      const float scale = is_e4m3 ? float8_scale<c10::Float8_e4m3fn>(seen.amax)
                                  : float8_scale<c10::Float8_e5m2>(seen.amax);
      *static_cast<Float8Scale*>(table.pointer(1, i)) = {scale, seen.is_finite() ? 1U : 0U};
      *static_cast<float*>(table.pointer(2, i)) = inverse_of_power_of_two(scale);
      *magnitudes = {};
    }
  }

 private:
  /// 128 bits of elements, moved by one instruction.
  template <typename In>
  struct alignas(16) Vec {
    static constexpr int kSize = 16 / static_cast<int>(sizeof(In));
    In lanes[kSize];
  };

  static __device__ __forceinline__ void join_lanes(Float8Magnitudes& seen) {
    constexpr unsigned kAll = 0xffffffffU;
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      seen.include(
          {__shfl_xor_sync(kAll, seen.amax, step), __shfl_xor_sync(kAll, seen.largest, step)});
    }
  }

  __device__ __forceinline__ void hand_on(const Thread& thread) const {
    if (thread.entry >= 0) {
      Float8Magnitudes* const magnitudes = zeros->magnitudes(thread.entry);
      atomicMax(&magnitudes->amax, thread.seen.amax);
      if (!thread.seen.is_finite()) {
        atomicMax(&magnitudes->largest, thread.seen.largest);
      }
    }
  }

  template <typename In>
  static __device__ __forceinline__ void include(Float8Magnitudes& seen, const Vec<In>& vec) {
#pragma unroll
    for (int k = 0; k < Vec<In>::kSize; ++k) {
      seen.include(static_cast<float>(vec.lanes[k]));
    }
  }

  template <typename In>
  static __device__ __forceinline__ void run(Float8Magnitudes& seen, const In* base,
                                             const ChunkRange& range, int lane) {
    constexpr int kVec = Vec<In>::kSize;
    const In* data = base + range.begin;
    std::int64_t n = range.end - range.begin;
    const auto past = static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % 16 / sizeof(In));
    const std::int64_t head = past == 0 ? 0 : min(static_cast<std::int64_t>(kVec - past), n);
    if (lane < head) {
      seen.include(static_cast<float>(data[lane]));
    }
    data += head;
    n -= head;
    const auto* vectors = reinterpret_cast<const Vec<In>*>(data);
    const std::int64_t vector_count = n / kVec;
    std::int64_t i = lane;
#pragma unroll 1  // unrolled further, the kernel no longer fits the registers of full occupancy
    for (; i + kWarpSize < vector_count; i += 2 * kWarpSize) {
      const Vec<In> a = vectors[i];
      const Vec<In> b = vectors[i + kWarpSize];
      include(seen, a);
      include(seen, b);
    }
    if (i < vector_count) {
      include(seen, vectors[i]);
    }
    const std::int64_t tail = vector_count * kVec + lane;
    if (tail < n) {
      seen.include(static_cast<float>(data[tail]));
    }
  }
};

}  // namespace fastamp::kernels::cuda
