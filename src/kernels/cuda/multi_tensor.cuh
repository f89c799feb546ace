// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs an op over any number of tensors in one launch (see launch_plan.h for the cutting).
//
// An op is a trivially copyable struct (bytes beyond kOpArgBytes are taken from the table) with
//   struct Thread;                                     what a thread carries through its ranges
//   __device__ Thread begin() const;                   called once, before the first range
//   __device__ void range(Thread&, const Table&, const ChunkRange&, int lane) const;
//                                                      32 lanes of a warp share the range
//   __device__ void end(Thread&) const;                called once by every thread of the block,
//                                                      also those without a range (may sync)
// and, where it needs them,
//   static constexpr int kThreads;                     threads per processor that the registers
//                                                      must suffice for, instead of all it can hold
//   static constexpr std::int64_t kChunkNumel;         elements per chunk, a power of two, instead
//                                                      of kFineChunkNumel
//   static constexpr std::uint32_t kMaxRuns;           cuts the chunks into that many runs at most,
//   __device__ void end_run(Thread&, std::uint32_t run, int lane) const;
//                                                      and is called at the end of each
//   unsigned* arrivals;                                zeros (zeroed_workspace.h), with
//   __device__ void finish(const Table&) const;        called by all threads of the last block
//
// The last block is the last one to arrive (last_block.cuh): it sees all that other blocks have
// written before their end(), and nothing that they read may change before it runs.

#include "kernels/cuda/last_block.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/launch_table.h"
#include "kernels/cuda/upload.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <cuda_runtime.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace fastamp::kernels::cuda {

// Blocks per processor that the registers must suffice for. All threads resident: 2048 on
// data-centre parts, 1536 on 8.6, 8.7, 8.9 and 12.x, 1024 on 7.5 (ptxas ignores the bound where it
// exceeds what the part holds).
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || \
                               __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
inline constexpr int kMaxThreads = 1536;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kMaxThreads = 1024;
#else
inline constexpr int kMaxThreads = 2048;
#endif

template <typename Op>
constexpr int resident_threads(int most) {
  if constexpr (requires { Op::kThreads; }) {
    return Op::kThreads < most ? Op::kThreads : most;
  } else {
    return most;
  }
}

template <typename Op>
inline constexpr bool kHasRuns = requires { Op::kMaxRuns; };
template <typename Op>
inline constexpr bool kFinishes = requires(Op op) { op.arrivals; };

template <typename Op>
constexpr std::int64_t chunk_numel() {
  if constexpr (requires { Op::kChunkNumel; }) {
    return Op::kChunkNumel;
  } else {
    return kFineChunkNumel;
  }
}

template <typename Op>
constexpr OpShape op_shape() {
  static_assert(std::has_single_bit(static_cast<std::uint64_t>(chunk_numel<Op>())));
  if constexpr (kHasRuns<Op>) {
    return {chunk_numel<Op>(), Op::kMaxRuns, kFinishes<Op>};
  } else {
    return {chunk_numel<Op>(), 0, kFinishes<Op>};
  }
}

template <typename Op>
inline constexpr int kMinBlocks = resident_threads<Op>(kMaxThreads) / kBlockThreads;

/// One warp's work on the chunks [first, last).
template <typename Table, typename Op, typename Thread>
__device__ __forceinline__ void apply_to_chunks(const Op& op, Thread& thread, const Table& table,
                                                std::uint32_t first, std::uint32_t last, int lane) {
  if (first < last) {
    ChunkCursor<chunk_numel<Op>(), Table> cursor(table, first, last);
    ChunkRange range;
    while (cursor.next(range)) {
      op.range(thread, table, range, lane);
    }
  }
}

template <typename Table, typename Op>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks<Op>)
    multi_tensor_kernel(const __grid_constant__ Table table, std::uint32_t chunks,
                        [[maybe_unused]] std::uint32_t runs, Op op) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::uint32_t worker = blockIdx.x * kBlockWarps + threadIdx.x / kWarpSize;
  const std::uint32_t workers = gridDim.x * kBlockWarps;
  auto thread = op.begin();
  if constexpr (kHasRuns<Op>) {
    const std::uint32_t stop = part_begin(runs, worker + 1, workers);
#pragma unroll 1
    for (std::uint32_t run = part_begin(runs, worker, workers); run < stop; ++run) {
      apply_to_chunks(op, thread, table, part_begin(chunks, run, runs),
                      part_begin(chunks, run + 1, runs), lane);
      op.end_run(thread, run, lane);
    }
  } else {  // a run for each worker; the loop would cost registers
    apply_to_chunks(op, thread, table, part_begin(chunks, worker, workers),
                    part_begin(chunks, worker + 1, workers), lane);
  }
  op.end(thread);
  if constexpr (kFinishes<Op>) {
    if (last_to_arrive(op.arrivals)) {
      op.finish(table);
    }
  }
}

template <typename Op>
DeviceShape current_device_shape() {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  const auto status = c10::cuda::currentStreamCaptureStatusMayInitCtx();
  const int threads = resident_threads<Op>(properties->maxThreadsPerMultiProcessor);
  return {properties->multiProcessorCount, threads / kBlockThreads,
          status != c10::cuda::CaptureStatus::None, takes_large_arguments()};
}

/// Bytes that the large argument table may have beside the op's own.
template <typename Op>
inline constexpr std::size_t kTableBytes =
    sizeof(Op) <= kOpArgBytes ? kLargeTableBytes
                              : (kMaxArgBytes - sizeof(Op) - 2 * alignof(std::max_align_t)) / 8 * 8;

template <std::size_t kDepth, typename Op>
inline constexpr TableCapacity kCapacityBeside = {kTableCapacity<kDepth>.small,
                                                  ArgTable<kDepth, kTableBytes<Op>>::kCapacity,
                                                  kEntryBytes<kDepth>};

template <std::size_t kDepth, std::size_t kBytes, typename Op>
void launch_with_args(Entries<kDepth> entries, const LaunchPlan& plan, const Op& op,
                      cudaStream_t stream) {
  using Table = ArgTable<kDepth, kBytes>;
  static_assert(sizeof(Table) + 2 * sizeof(std::uint32_t) + sizeof(Op) + alignof(Op) <=
                kMaxArgBytes);
  Table table;
  fill_table<chunk_numel<Op>()>(table, entries);
  launch(multi_tensor_kernel<Table, Op>, plan.blocks, kBlockThreads, stream, table, plan.chunks,
         plan.runs, op);
}

template <std::size_t kDepth, typename Op>
void launch_with_device_table(Entries<kDepth> entries, const LaunchPlan& plan, const Op& op,
                              c10::cuda::CUDAStream stream) {
  static_assert(sizeof(DeviceTable<kDepth>) + 2 * sizeof(std::uint32_t) + sizeof(Op) +
                    alignof(Op) <=
                kMaxArgBytesOfOldDrivers);
  const auto bytes = device_table_bytes(entries.size(), kEntryBytes<kDepth>);
  const auto resident =
      upload(bytes, [&](void* to) { fill_device_table<chunk_numel<Op>()>(to, entries); }, stream);
  const auto table = view_device_table<kDepth>(resident.get(), entries.size());
  launch(multi_tensor_kernel<DeviceTable<kDepth>, Op>, plan.blocks, kBlockThreads, stream, table,
         plan.chunks, plan.runs, op);
}

/// Applies `op` to the entries, the empty ones last, on the current stream of the current device,
/// in one launch. No host synchronisation.
template <std::size_t kDepth, typename Op>
void multi_tensor_apply(const std::vector<TensorEntry<kDepth>>& entries, const Op& op) {
  static_assert(kDepth >= 1 && kDepth <= 9);
  static_assert(std::is_trivially_copyable_v<Op> && sizeof(Op) <= kSmallTableBytes);
  std::vector<std::int64_t> numels;
  numels.reserve(entries.size());
  for (const auto& entry : entries) {
    numels.push_back(entry.numel);
  }
  const auto stream = at::cuda::getCurrentCUDAStream();
  const auto plan =
      plan_launch(numels, kCapacityBeside<kDepth, Op>, op_shape<Op>(), current_device_shape<Op>());
  if (plan.blocks == 0) {
    return;
  }
  switch (plan.home) {
    case TableHome::kSmallArgs:
      launch_with_args<kDepth, kSmallTableBytes>(Entries<kDepth>(entries), plan, op, stream);
      break;
    case TableHome::kLargeArgs:
      launch_with_args<kDepth, kTableBytes<Op>>(Entries<kDepth>(entries), plan, op, stream);
      break;
    case TableHome::kDevice:
      launch_with_device_table<kDepth>(Entries<kDepth>(entries), plan, op, stream);
      break;
  }
}

}  // namespace fastamp::kernels::cuda
