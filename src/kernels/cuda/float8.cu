// SPDX-License-Identifier: Apache-2.0
// Casts of matrices to fp8 on CUDA: one launch for the scales of all (float8_range.cuh), one for
// the casts (float8_tiles.cuh), and one for each matrix whose columns are summed. The scales stay
// on the device: nothing waits for them.

#include "kernels/cuda/float8.h"
#include "kernels/cuda/float8_copies.cuh"
#include "kernels/cuda/float8_tiles.cuh"
#include "kernels/cuda/zeroed_workspace.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <utility>

namespace fastamp::kernels::cuda {
namespace {

/// Threads of a block that adds sums: few, so that the columns of usual matrices reach all
/// processors.
constexpr int kSumThreads = 32;

/// Bytes of scratch memory, so that what follows is aligned.
std::size_t aligned(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

std::size_t bytes_of_sums(const Float8CastEntry& entry) {
  const auto count = float8_partial_rows(entry.rows) * entry.columns;
  return entry.column_sums == nullptr ? 0
                                      : aligned(static_cast<std::size_t>(count) * sizeof(float));
}

/// A number in a list of pointers.
void* as_pointer(std::int64_t number) { return reinterpret_cast<void*>(number); }

void find_scales(const std::vector<Float8CastEntry>& entries, Float8Scale* scales) {
  std::vector<TensorEntry<3>> list;
  list.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    // Only read through; the table has one pointer type.
    list.push_back({{const_cast<void*>(entry.in), scales + i, entry.inverse_scale},
                    entry.rows * entry.columns,
                    float8_tag(entry.from, entry.to)});
  }
  const ZeroedWorkspace memory(float8_zeros_bytes(entries.size()),
                               at::cuda::getCurrentCUDAStream());
  auto* zeros = static_cast<Float8Zeros*>(memory.get());
  multi_tensor_apply(list, Float8RangeOp{&zeros->arrivals, zeros});
}

}  // namespace

void cast_to_float8(std::vector<Float8CastEntry> entries, c10::Device device) {
  if (entries.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(device);
  std::stable_partition(entries.begin(), entries.end(), [](const Float8CastEntry& entry) {
    return entry.rows != 0 && entry.columns != 0;
  });
  // Scratch memory: the scales, then the sums that tiles of rows leave. From the caching allocator:
  // reuse is ordered by the stream, and under capture by the graph.
  auto bytes = aligned(entries.size() * sizeof(Float8Scale));
  std::vector<std::size_t> starts;
  starts.reserve(entries.size());
  for (const auto& entry : entries) {
    starts.push_back(std::exchange(bytes, bytes + bytes_of_sums(entry)));
  }
  const auto scratch = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  auto* const scales = static_cast<Float8Scale*>(scratch.get());
  const auto sums_of = [&](std::size_t i) {
    auto* start = static_cast<unsigned char*>(scratch.get()) + starts[i];
    return entries[i].column_sums == nullptr ? nullptr : reinterpret_cast<float*>(start);
  };
  find_scales(entries, scales);
  std::vector<TensorEntry<Float8TileOp::kLists>> list;
  list.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    list.push_back({{const_cast<void*>(entry.in), entry.row_major, entry.transposed, sums_of(i),
                     scales + i, as_pointer(entry.rows), as_pointer(entry.columns)},
                    float8_tile_count(entry.rows, entry.columns),
                    float8_tag(entry.from, entry.to)});
  }
  multi_tensor_apply(list, Float8TileOp{});
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    if (entry.column_sums != nullptr && entry.columns != 0) {
      const auto blocks = chunk_count(entry.columns, kSumThreads);
      launch(add_float8_sums_kernel, static_cast<unsigned>(blocks), kSumThreads,
             at::cuda::getCurrentCUDAStream(), sums_of(i), float8_partial_rows(entry.rows),
             entry.columns, entry.column_sums);
    }
  }
}

void refresh_float8_copies(const std::vector<Float8CopyEntry>& entries, c10::Device device) {
  if (entries.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(device);
  std::vector<TensorEntry<Float8RefreshOp::kLists>> list;
  list.reserve(entries.size());
  for (const auto& entry : entries) {
    list.push_back({{const_cast<void*>(entry.weight), entry.copy, entry.transposed, nullptr,
                     float8_header(entry.copy), as_pointer(entry.rows), as_pointer(entry.columns)},
                    float8_tile_count(entry.rows, entry.columns),
                    float8_tag(at::kFloat, at::kFloat8_e4m3fn)});
  }
  const ZeroedWorkspace memory(sizeof(unsigned), at::cuda::getCurrentCUDAStream());
  multi_tensor_apply(list, Float8RefreshOp{static_cast<unsigned*>(memory.get())});
}

}  // namespace fastamp::kernels::cuda
