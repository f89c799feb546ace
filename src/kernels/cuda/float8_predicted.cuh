// SPDX-License-Identifier: Apache-2.0
#pragma once

// Cast of one matrix to fp8 by the scale that the amax of its last cast predicts: the passes of
// float8_range.cuh and float8_tiles.cuh in one read.
//
// Layout, mapping and sums: float8_tiles.cuh. Beside it each thread keeps the magnitudes of what it
// reads; blocks hand them on as the range pass does, and the last block (last_block.cuh) looks
// whether the scale fits: nothing saturates, fewer than three binades are wasted, all is finite. If
// not, it chooses another one, and the launch that follows, of Float8TileOp, casts again; else that
// launch returns at once. Traffic per element: one read, one byte per copy; as often as the scale
// does not fit, that again. Numerics: the bits of the CPU kernel, whatever the order.
// The scale is computed by each block from last_amax, which only the last block writes, when all
// others have read it: calls that share a last_amax are on one stream. Proof: docs/cuda.md.

#include "kernels/cuda/float8_tiles.cuh"

namespace fastamp::kernels::cuda {

/// For a list of one entry, whose lists are those of Float8TileOp.
struct Float8PredictedOp {
  static constexpr std::int64_t kChunkNumel = Float8TileOp::kChunkNumel;
  /// The magnitudes beside what Float8TileOp holds take 96 registers: with more threads they would
  /// spill. 32 KiB in flight per processor.
  static constexpr int kThreads = 512;
  static constexpr std::size_t kLists = Float8TileOp::kLists;

  unsigned* arrivals;
  Float8Zeros* zeros;  ///< Where arrivals are.
  std::uint32_t* last_amax;
  std::uint32_t headroom;
  float* inverse_scale;

  struct Thread {
    Float8Magnitudes seen;
  };

  __device__ Thread begin() const { return {}; }

  template <typename Table>
  __device__ void range(Thread& thread, const Table& table, const ChunkRange& range,
                        int lane) const {
    using Tiles = Float8Tiles<true>;
    const auto tag = packed_tag(table.packed[range.entry]);
    const Float8Scale scale{from_bits(predicted_exponent(tag) << 23U), 1U, 0U};
    Tiles::run(Tiles::matrix_of(table, range.entry, scale), tag, range, lane, thread.seen);
  }

  __device__ void end(Thread& thread) const {
    constexpr unsigned kAll = 0xffffffffU;
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      thread.seen.include({__shfl_xor_sync(kAll, thread.seen.amax, step),
                           __shfl_xor_sync(kAll, thread.seen.largest, step)});
    }
    if (threadIdx.x % kWarpSize == 0) {
      Float8Magnitudes* const magnitudes = zeros->magnitudes(0);
      atomicMax(&magnitudes->amax, thread.seen.amax);
      if (!thread.seen.is_finite()) {
        atomicMax(&magnitudes->largest, thread.seen.largest);
      }
    }
  }

  template <typename Table>
  __device__ void finish(const Table& table) const {
    if (threadIdx.x != 0) {
      return;
    }
    Float8Magnitudes* const magnitudes = zeros->magnitudes(0);
    const Float8Magnitudes seen{__ldcg(&magnitudes->amax), __ldcg(&magnitudes->largest)};
    const auto tag = packed_tag(table.packed[0]);
    std::uint32_t exponent = predicted_exponent(tag);
    const bool fits = *last_amax != kUnknownAmax && exponent_fits(tag, exponent, seen.amax);
    exponent = fits ? exponent : own_exponent(tag, seen.amax);
    const float scale = from_bits(exponent << 23U);
    *static_cast<Float8Scale*>(table.pointer(4, 0)) = {scale, seen.is_finite() ? 1U : 0U,
                                                       fits && seen.is_finite() ? 1U : 0U};
    *inverse_scale = inverse_of_power_of_two(scale);
    *last_amax = seen.amax;
    *magnitudes = {};
  }

 private:
  static __device__ __forceinline__ bool is_e4m3(std::uint16_t tag) {
    return tagged_format(tag) == at::kFloat8_e4m3fn;
  }
  static constexpr std::uint32_t kTopOfE4m3 = Float8Format<c10::Float8_e4m3fn>::kTop;
  static constexpr std::uint32_t kTopOfE5m2 = Float8Format<c10::Float8_e5m2>::kTop;

  __device__ __forceinline__ std::uint32_t predicted_exponent(std::uint16_t tag) const {
    const std::uint32_t amax = *last_amax == kUnknownAmax ? 0U : *last_amax;
    return is_e4m3(tag) ? predicted_float8_exponent<kTopOfE4m3>(amax, headroom)
                        : predicted_float8_exponent<kTopOfE5m2>(amax, headroom);
  }
  __device__ __forceinline__ bool exponent_fits(std::uint16_t tag, std::uint32_t exponent,
                                                std::uint32_t amax) const {
    return is_e4m3(tag) ? float8_exponent_fits<kTopOfE4m3>(exponent, amax, headroom)
                        : float8_exponent_fits<kTopOfE5m2>(exponent, amax, headroom);
  }
  static __device__ __forceinline__ std::uint32_t own_exponent(std::uint16_t tag,
                                                               std::uint32_t amax) {
    return is_e4m3(tag) ? float8_exponent<kTopOfE4m3>(amax) : float8_exponent<kTopOfE5m2>(amax);
  }
};

}  // namespace fastamp::kernels::cuda
