// SPDX-License-Identifier: Apache-2.0
#pragma once

// Second pass of a cast to fp8: scales matrices, and writes them row by row, transposed, or both.
//
// Layout: dense row-major matrices; in the transposed copy rows are padded to a multiple of 16.
// Mapping: a matrix is cut into tiles of 64 rows x 32 columns, and a warp gets a run of tiles
// (launch_plan.h, where a chunk is one tile). A thread owns 16 rows of 4 columns: 16 bytes of four
// transposed rows, so that bytes are transposed in registers, with neither shared memory nor
// barriers; with 8 columns registers would spill. It loads 64 bytes before it stores any. Each
// access of a warp fills whole sectors: loads of 16-bit elements 4 x 64 bytes, stores of rows
// 4 x 32 (the warp's next tile has the next 32), stores of transposed rows 8 x 64. Where rows do
// not begin on boundaries of four elements, and in tensors with inf or NaN, which the conversion
// in hardware does not keep, lanes take neighbouring columns, an element at a time.
// Traffic per element: one read, one byte per copy; with column sums 1/4 byte more, written and
// read. Numerics: kernels/functors/float8.h, the CPU kernel's bits. A thread sums its 16 rows
// (kFloat8TileRows) in fp32, in order; a second kernel adds these sums in fp64, in order, a thread
// for each column. So no sum depends on the launch shape. Proof: docs/cuda.md.

#include "kernels/cuda/float8_range.cuh"

namespace fastamp::kernels::cuda {

/// A warp's tile: four bands of kFloat8TileRows rows, eight groups of four columns.
inline constexpr int kFloat8Bands = 4;
inline constexpr std::int64_t kFloat8BandRows = kFloat8Bands * kFloat8TileRows;
inline constexpr std::int64_t kFloat8BandColumns = kWarpSize;

constexpr std::int64_t float8_tile_count(std::int64_t rows, std::int64_t columns) {
  return chunk_count(rows, kFloat8BandRows) * chunk_count(columns, kFloat8BandColumns);
}
/// Sums that each column of a matrix leaves.
constexpr std::int64_t float8_partial_rows(std::int64_t rows) {
  return chunk_count(rows, kFloat8TileRows);
}

/// Loops of a warp that casts tiles.
struct Float8Tiles {
  struct Matrix {
    const void* in;
    std::uint8_t* row_major;
    std::uint8_t* transposed;
    float* partial;
    std::int64_t rows;
    std::int64_t columns;
    Float8Scale scale;

    __device__ std::int64_t padded_rows() const {
      return (rows + kFloat8TileRows - 1) / kFloat8TileRows * kFloat8TileRows;
    }
  };

  /// Moved by one instruction.
  template <typename In>
  struct alignas(4 * sizeof(In)) Four {
    In lanes[4];
  };

  /// Read from memory, pointers have lost their address space; generic accesses are slower. Said
  /// where they are used: said earlier, it keeps nvcc from joining stores.
  template <typename T>
  static __device__ __forceinline__ T* global(T* pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
  }

  template <typename Table>
  static __device__ __forceinline__ Matrix matrix_of(const Table& table, std::int32_t entry,
                                                     const Float8Scale& scale) {
    void* pointers[4];
#pragma unroll
    for (int list = 0; list < 4; ++list) {
      pointers[list] = table.pointer(list, entry);
    }
    return {pointers[0],
            static_cast<std::uint8_t*>(pointers[1]),
            static_cast<std::uint8_t*>(pointers[2]),
            static_cast<float*>(pointers[3]),
            reinterpret_cast<std::int64_t>(table.pointer(5, entry)),
            reinterpret_cast<std::int64_t>(table.pointer(6, entry)),
            scale};
  }

  static __device__ __forceinline__ void run(const Matrix& matrix, std::uint16_t tag,
                                             const ChunkRange& range, int lane) {
    if (tagged_format(tag) == at::kFloat8_e4m3fn) {
      run_from<c10::Float8_e4m3fn>(tagged_source(tag), matrix, range, lane);
    } else {
      run_from<c10::Float8_e5m2>(tagged_source(tag), matrix, range, lane);
    }
  }

  template <typename Out>
  static __device__ __forceinline__ void run_from(at::ScalarType from, const Matrix& matrix,
                                                  const ChunkRange& range, int lane) {
    switch (from) {
      case at::kFloat:
        return run_pair<float, Out>(matrix, range, lane);
      case at::kHalf:
        return run_pair<c10::Half, Out>(matrix, range, lane);
      default:
        return run_pair<c10::BFloat16, Out>(matrix, range, lane);
    }
  }

  template <typename In, typename Out>
  static __device__ __forceinline__ void run_pair(const Matrix& matrix, const ChunkRange& range,
                                                  int lane) {
    const bool by_fours = reinterpret_cast<std::uintptr_t>(matrix.in) % sizeof(Four<In>) == 0 &&
                          matrix.columns % 4 == 0 && matrix.scale.is_finite != 0;
    for_each_tile(matrix, range, [&](std::int64_t row, std::int64_t column) {
      if (by_fours) {
        cast_fours<In, Out>(matrix, row + lane / 8 * kFloat8TileRows, column + lane % 8 * 4);
      } else {
#pragma unroll 1
        for (int band = 0; band < kFloat8Bands; ++band) {
          cast_column<In, Out>(matrix, row + band * kFloat8TileRows, column + lane);
        }
      }
    });
  }

  /// Calls function(first row, first column) for the tiles of a range.
  template <typename Function>
  static __device__ __forceinline__ void for_each_tile(const Matrix& matrix,
                                                       const ChunkRange& range,
                                                       const Function& function) {
    // Tiles are fewer than 2^32 (plan_launch).
    const auto across =
        static_cast<std::uint32_t>((matrix.columns + kFloat8BandColumns - 1) / kFloat8BandColumns);
    const auto end = static_cast<std::uint32_t>(range.end);
#pragma unroll 1
    for (auto tile = static_cast<std::uint32_t>(range.begin); tile < end; ++tile) {
      function(kFloat8BandRows * (tile / across), kFloat8BandColumns * (tile % across));
    }
  }

  static __device__ __forceinline__ int height_at(const Matrix& matrix, std::int64_t row) {
    return static_cast<int>(min(matrix.rows - row, kFloat8TileRows));
  }

  static __device__ __forceinline__ std::uint8_t* row_major_at(const Matrix& matrix,
                                                               std::int64_t at) {
    return matrix.row_major == nullptr ? nullptr : global(matrix.row_major + at);
  }

  /// 16 rows of four columns that are moved together.
  template <typename In, typename Out>
  static __device__ __forceinline__ void cast_fours(const Matrix& matrix, std::int64_t row,
                                                    std::int64_t column) {
    if (row >= matrix.rows || column >= matrix.columns) {
      return;
    }
    Four<float> sums{};
    if (height_at(matrix, row) == kFloat8TileRows) {
      cast_whole<In, Out>(matrix, row, column, sums);
    } else {
      cast_remainder<In, Out>(matrix, row, column, sums);
    }
    if (matrix.partial != nullptr) {
      float* to = global(matrix.partial + row / kFloat8TileRows * matrix.columns + column);
      *reinterpret_cast<Four<float>*>(to) = sums;
    }
  }

  template <typename In, typename Out>
  static __device__ __forceinline__ void cast_whole(const Matrix& matrix, std::int64_t row,
                                                    std::int64_t column, Four<float>& sums) {
    constexpr int kLoads = 64 / static_cast<int>(sizeof(Four<In>));
    const std::int64_t start = row * matrix.columns + column;
    const In* from = global(static_cast<const In*>(matrix.in) + start);
    std::uint8_t* to = row_major_at(matrix, start);
    Four<std::uint32_t> transposed[4] = {};
#pragma unroll 1  // unrolled, its addresses are kept from tile to tile, and registers spill
    for (int first = 0; first < kFloat8TileRows; first += kLoads) {
      Four<In> values[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        values[i] = *reinterpret_cast<const Four<In>*>(from);
        from += matrix.columns;
      }
#pragma unroll
      for (int i = 0; i < kLoads; i += 4) {
        Four<std::uint32_t> casts = cast_square<Out>(values + i, matrix.scale.scale, sums);
        if (matrix.row_major != nullptr) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            *reinterpret_cast<std::uint32_t*>(to) = casts.lanes[k];
            to += matrix.columns;
          }
        }
        casts = transpose_bytes(casts);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          append(transposed[k], casts.lanes[k]);
        }
      }
    }
    if (matrix.transposed != nullptr) {
      store_transposed(matrix, row, column, transposed);
    }
  }

  /// Four columns of 16 rows each.
  static __device__ __forceinline__ void store_transposed(const Matrix& matrix, std::int64_t row,
                                                          std::int64_t column,
                                                          const Four<std::uint32_t> (&columns)[4]) {
    const std::int64_t padded = matrix.padded_rows();
    std::uint8_t* across = global(matrix.transposed + column * padded + row);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto& words = columns[k].lanes;
      *reinterpret_cast<uint4*>(across) = uint4{words[0], words[1], words[2], words[3]};
      across += padded;
    }
  }

  /// 16 rows of four columns of the row-major copy, written transposed.
  static __device__ __forceinline__ void transpose_whole(const Matrix& matrix, std::int64_t row,
                                                         std::int64_t column) {
    if (row >= matrix.rows || column >= matrix.columns) {
      return;
    }
    const std::uint8_t* from = row_major_at(matrix, row * matrix.columns + column);
    std::uint32_t rows[kFloat8TileRows];
#pragma unroll
    for (int i = 0; i < kFloat8TileRows; ++i) {
      rows[i] = *reinterpret_cast<const std::uint32_t*>(from);
      from += matrix.columns;
    }
    Four<std::uint32_t> columns[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto square =
          transpose_bytes({{rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]}});
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        columns[k].lanes[i] = square.lanes[k];
      }
    }
    store_transposed(matrix, row, column, columns);
  }

  /// Shifts a word in, since indexed ones would lie in local memory.
  static __device__ __forceinline__ void append(Four<std::uint32_t>& words, std::uint32_t word) {
    words = {{words.lanes[1], words.lanes[2], words.lanes[3], word}};
  }

  /// The last rows, where they are fewer than 16: four at a time, with fewer registers.
  template <typename In, typename Out>
  static __device__ __forceinline__ void cast_remainder(const Matrix& matrix, std::int64_t row,
                                                        std::int64_t column, Four<float>& sums) {
    const int height = height_at(matrix, row);
    const std::int64_t padded = matrix.padded_rows();
#pragma unroll 1
    for (int first = 0; first < kFloat8TileRows; first += 4) {
      const std::int64_t start = (row + first) * matrix.columns + column;
      Four<In> values[4] = {};  // Missing rows are zeros, which change no sum.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < height) {
          values[i] = *reinterpret_cast<const Four<In>*>(
              global(static_cast<const In*>(matrix.in) + start + i * matrix.columns));
        }
      }
      const Four<std::uint32_t> casts = cast_square<Out>(values, matrix.scale.scale, sums);
      const Four<std::uint32_t> columns = transpose_bytes(casts);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (matrix.row_major != nullptr && first + i < height) {
          *reinterpret_cast<std::uint32_t*>(global(matrix.row_major + start + i * matrix.columns)) =
              casts.lanes[i];
        }
        if (matrix.transposed != nullptr) {
          *reinterpret_cast<std::uint32_t*>(
              global(matrix.transposed + (column + i) * padded + row + first)) = columns.lanes[i];
        }
      }
    }
  }

  /// Four rows of four columns: adds them to the sums, and makes each row a word.
  template <typename Out, typename In>
  static __device__ __forceinline__ Four<std::uint32_t> cast_square(const Four<In>* rows,
                                                                    float scale,
                                                                    Four<float>& sums) {
    Four<std::uint32_t> casts;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        values[k] = static_cast<float>(rows[i].lanes[k]);
        sums.lanes[k] += values[k];
      }
      const std::uint32_t low = float8_pair_of_finite<Out>(values[0], values[1], scale);
      const std::uint32_t high = float8_pair_of_finite<Out>(values[2], values[3], scale);
      casts.lanes[i] = low | high << 16U;
    }
    return casts;
  }

  /// Four rows of four bytes as columns; the first byte is the lowest.
  static __device__ __forceinline__ Four<std::uint32_t> transpose_bytes(
      const Four<std::uint32_t>& rows) {
    const std::uint32_t low_01 = __byte_perm(rows.lanes[0], rows.lanes[1], 0x5140);
    const std::uint32_t low_23 = __byte_perm(rows.lanes[2], rows.lanes[3], 0x5140);
    const std::uint32_t high_01 = __byte_perm(rows.lanes[0], rows.lanes[1], 0x7362);
    const std::uint32_t high_23 = __byte_perm(rows.lanes[2], rows.lanes[3], 0x7362);
    return {{__byte_perm(low_01, low_23, 0x5410), __byte_perm(low_01, low_23, 0x7632),
             __byte_perm(high_01, high_23, 0x5410), __byte_perm(high_01, high_23, 0x7632)}};
  }

  template <typename In>
  static __device__ __forceinline__ float widen(In value) {
    return static_cast<float>(value);
  }
  /// The instruction makes every NaN a positive one; here it keeps its sign, as on the CPU.
  static __device__ __forceinline__ float widen(c10::Half value) {
    const auto sign = static_cast<std::uint32_t>(value.x & 0x8000U) << 16U;
    return from_bits(magnitude_bits(static_cast<float>(value)) | sign);
  }

  /// 16 rows of a column, whatever the elements and the alignment.
  template <typename In, typename Out>
  static __device__ __forceinline__ void cast_column(const Matrix& matrix, std::int64_t row,
                                                     std::int64_t column) {
    if (row >= matrix.rows || column >= matrix.columns) {
      return;
    }
    const int height = height_at(matrix, row);
    const std::int64_t start = row * matrix.columns + column;
    const In* from = global(static_cast<const In*>(matrix.in) + start);
    std::uint8_t* to = row_major_at(matrix, start);
    float sum = 0;
#pragma unroll 1
    for (int first = 0; first < kFloat8TileRows; first += 4) {
      const int missing_from = height - first;
      In values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = *from;
        from += i + 1 < missing_from ? matrix.columns : 0;
      }
      std::uint32_t word = 0;
#pragma unroll 1
      for (int i = 0; i < min(missing_from, 4); ++i) {
        const float value = widen(values[0]);
        values[0] = values[1];  // Indexed, they would be in local memory.
        values[1] = values[2];
        values[2] = values[3];
        const std::uint32_t byte = float8_of<Out>(value, matrix.scale.scale).x;
        sum += value;
        word |= byte << (i * 8);
        if (matrix.row_major != nullptr) {
          *to = static_cast<std::uint8_t>(byte);
        }
        to += matrix.columns;
      }
      if (matrix.transposed != nullptr) {
        *reinterpret_cast<std::uint32_t*>(
            global(matrix.transposed + column * matrix.padded_rows() + row + first)) = word;
      }
    }
    if (matrix.partial != nullptr) {
      *global(matrix.partial + row / kFloat8TileRows * matrix.columns + column) = sum;
    }
  }
};

/// Lists of an entry: matrix, row-major copy, transposed copy, sums of tiles, Float8Scale; and
/// rows and columns, as numbers.
struct Float8TileOp {
  static constexpr std::int64_t kChunkNumel = 1;  // numel counts tiles
  /// Bound: with more, what is transposed would spill. 48 KiB in flight per processor.
  static constexpr int kThreads = 768;
  static constexpr std::size_t kLists = 7;

  struct Thread {};

  __device__ Thread begin() const { return {}; }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void range(Thread& /*thread*/, const Table& table, const ChunkRange& range,
                        int lane) const {
    using Tiles = Float8Tiles;
    const Float8Scale scale =
        *Tiles::global(static_cast<const Float8Scale*>(table.pointer(4, range.entry)));
    Tiles::run(Tiles::matrix_of(table, range.entry, scale), packed_tag(table.packed[range.entry]),
               range, lane);
  }
};

/// Adds what tiles of rows have left, a thread for each column. Sums are in order, one after the
/// other: eight loads are in flight all the same.
__global__ void add_float8_sums_kernel(const float* partial, std::int64_t tiles,
                                       std::int64_t columns, float* sums) {
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= columns) {
    return;
  }
  double sum = 0;
#pragma unroll 8
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    sum += static_cast<double>(partial[tile * columns + column]);
  }
  sums[column] = static_cast<float>(sum);
}

}  // namespace fastamp::kernels::cuda
