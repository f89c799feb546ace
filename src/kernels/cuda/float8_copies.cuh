// SPDX-License-Identifier: Apache-2.0
#pragma once

// Refresh of fp8 copies that a fused step has written: functors/float8_copy.h says what that is.
//
// Layout: float32 matrices and their copies row by row, the transposed copies column by column; all
// sizes are multiples of 16, so that nothing is padded. Mapping: tiles, warps and threads of
// float8_tiles.cuh. Every block decides from the header what is to be done, and the last one
// (last_block.cuh) rewrites it, when all have read it. Where a copy stands, a thread moves 16 rows
// of four bytes and transposes them in registers: loads fill sectors of 32 bytes, stores of 64.
// Traffic per element: one byte read and one written; nothing without a transposed copy or after a
// skipped step; where the scale has changed, or a weight is inf or NaN, the four bytes of the
// weight read and one per copy written. No pass for the range: the step has left it. Numerics: the
// bits of a cast (float8_tiles.cuh). Proof: docs/cuda.md.

#include "kernels/cuda/float8_tiles.cuh"
#include "kernels/functors/float8_copy.h"

namespace fastamp::kernels::cuda {

/// Lists of an entry as Float8TileOp's; in the place of its scale the header, and no sums.
struct Float8RefreshOp {
  static constexpr std::int64_t kChunkNumel = Float8TileOp::kChunkNumel;
  static constexpr int kThreads = Float8TileOp::kThreads;
  static constexpr std::size_t kLists = Float8TileOp::kLists;
  using Tiles = Float8Tiles;

  unsigned* arrivals;

  struct Thread {};

  __device__ Thread begin() const { return {}; }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void range(Thread& /*thread*/, const Table& table, const ChunkRange& range,
                        int lane) const {
    const Float8CopyRefresh refresh(*header_of(table, range.entry));
    if (!refresh.has_step) {
      return;
    }
    const Tiles::Matrix matrix =
        Tiles::matrix_of(table, range.entry, {refresh.scale, refresh.is_finite ? 1U : 0U});
    if (refresh.stands) {
      transpose(matrix, range, lane);
    } else {
      Tiles::run_pair<float, c10::Float8_e4m3fn>(matrix, range, lane);
    }
  }

  template <typename Table>
  __device__ void finish(const Table& table) const {
#pragma unroll 1
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < table.count; i += kBlockThreads) {
      Float8CopyHeader* const header = header_of(table, i);
      const Float8CopyRefresh refresh(*header);
      if (refresh.has_step) {
        *header = refresh.header();
      }
    }
  }

 private:
  template <typename Table>
  static __device__ __forceinline__ Float8CopyHeader* header_of(const Table& table,
                                                                std::int32_t entry) {
    return Tiles::global(static_cast<Float8CopyHeader*>(table.pointer(4, entry)));
  }

  static __device__ __forceinline__ void transpose(const Tiles::Matrix& matrix,
                                                   const ChunkRange& range, int lane) {
    if (matrix.transposed == nullptr) {
      return;
    }
    Tiles::for_each_tile(matrix, range, [&](std::int64_t row, std::int64_t column) {
      Tiles::transpose_whole(matrix, row + lane / 8 * kFloat8TileRows, column + lane % 8 * 4);
    });
  }
};

}  // namespace fastamp::kernels::cuda
