#pragma once

// Runs an op over any number of tensors in one launch (see launch_plan.h for the cutting).
//
// An op is a trivially copyable struct (what it holds beyond kOpArgBytes is the table's loss) with
//   struct Thread;                                     what a thread carries through its ranges
//   __device__ Thread begin() const;                   called once, before the first range
//   __device__ void range(Thread&, const Table&, const ChunkRange&, int lane) const;
//                                                      32 lanes of a warp share the range
//   __device__ void end(Thread&) const;                called once by every thread of the block,
//                                                      also those without a range (may sync)
//   static constexpr int kThreads;                     optional: threads of a processor to fit the
//                                                      registers to, instead of all it can hold

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/launch_table.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace fastamp::kernels::cuda {

// Blocks per processor to fit the registers to. All threads resident: 2048 on data-centre parts,
// 1536 on 8.6, 8.7, 8.9 and 12.x (ptxas ignores the bound where it exceeds what the part holds).
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || \
                               __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
inline constexpr int kMaxThreads = 1536;
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
inline constexpr int kMinBlocks = resident_threads<Op>(kMaxThreads) / kBlockThreads;

template <typename Table, typename Op>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks<Op>)
    multi_tensor_kernel(const __grid_constant__ Table table, std::uint32_t chunks, Op op) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::uint32_t worker = blockIdx.x * kBlockWarps + threadIdx.x / kWarpSize;
  const std::uint32_t workers = gridDim.x * kBlockWarps;
  auto thread = op.begin();
  const std::uint32_t first = worker_begin(chunks, worker, workers);
  const std::uint32_t last = worker_begin(chunks, worker + 1, workers);
  if (first < last) {
    ChunkCursor<Table> cursor(table, first, last);
    ChunkRange range;
    while (cursor.next(range)) {
      op.range(thread, table, range, lane);
    }
  }
  op.end(thread);
}

template <typename Op>
DeviceShape current_device_shape() {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  const auto status = c10::cuda::currentStreamCaptureStatusMayInitCtx();
  const int threads = resident_threads<Op>(properties->maxThreadsPerMultiProcessor);
  return {properties->multiProcessorCount, threads / kBlockThreads,
          status != c10::cuda::CaptureStatus::None};
}

/// Bytes that the large argument table may have beside the op's own.
template <typename Op>
inline constexpr std::size_t kTableBytes =
    sizeof(Op) <= kOpArgBytes ? kLargeTableBytes
                              : (kMaxArgBytes - sizeof(Op) - 2 * alignof(std::max_align_t)) / 8 * 8;

template <std::size_t kDepth, typename Op>
inline constexpr TableCapacity kCapacityBeside = {kTableCapacity<kDepth>.small,
                                                  ArgTable<kDepth, kTableBytes<Op>>::kCapacity};

template <std::size_t kDepth, std::size_t kBytes, typename Op>
void launch_with_args(Entries<kDepth> entries, const Launch& plan, const Op& op,
                      cudaStream_t stream) {
  using Table = ArgTable<kDepth, kBytes>;
  static_assert(sizeof(Table) + sizeof(std::uint32_t) + sizeof(Op) + alignof(Op) <= kMaxArgBytes);
  Table table;
  fill_table(table, entries);
  launch(multi_tensor_kernel<Table, Op>, plan.blocks, kBlockThreads, stream, table, plan.chunks,
         op);
}

/// The pinned buffer may be reused once the copy is done (record_event), the device buffer once
/// the kernel is (the allocator orders reuse by the stream it was taken on).
template <std::size_t kDepth, typename Op>
void launch_with_device_table(Entries<kDepth> entries, const Launch& plan, const Op& op,
                              c10::cuda::CUDAStream stream) {
  const std::size_t bytes = device_table_bytes<kDepth>(entries.size());
  auto* host_allocator = at::getHostAllocator(at::kCUDA);
  const at::DataPtr pinned = host_allocator->allocate(bytes);
  const at::DataPtr resident = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  fill_device_table<kDepth>(pinned.get(), entries);
  C10_CUDA_CHECK(
      cudaMemcpyAsync(resident.get(), pinned.get(), bytes, cudaMemcpyHostToDevice, stream));
  host_allocator->record_event(pinned.get(), pinned.get_context(), stream.unwrap());
  const auto table = view_device_table<kDepth>(resident.get(), entries.size());
  launch(multi_tensor_kernel<DeviceTable<kDepth>, Op>, plan.blocks, kBlockThreads, stream, table,
         plan.chunks, op);
}

/// Applies `op` to the entries (none empty) on the current stream of the current device: one
/// launch, or several argument-table launches under stream capture. No host synchronisation.
template <std::size_t kDepth, typename Op>
void multi_tensor_apply(const std::vector<TensorEntry<kDepth>>& entries, const Op& op) {
  static_assert(kDepth >= 1 && kDepth <= 7);
  static_assert(std::is_trivially_copyable_v<Op> && sizeof(Op) <= kSmallTableBytes);
  std::vector<std::int64_t> numels;
  numels.reserve(entries.size());
  for (const auto& entry : entries) {
    numels.push_back(entry.numel);
  }
  const auto stream = at::cuda::getCurrentCUDAStream();
  for (const auto& plan :
       plan_launches(numels, kTableCapacity<kDepth>, current_device_shape<Op>())) {
    const auto part = Entries<kDepth>(entries).slice(plan.first, plan.last - plan.first);
    switch (plan.home) {
      case TableHome::kSmallArgs:
        launch_with_args<kDepth, kSmallTableBytes>(part, plan, op, stream);
        break;
      case TableHome::kLargeArgs:
        launch_with_args<kDepth, kTableBytes<Op>>(part, plan, op, stream);
        break;
      case TableHome::kDevice:
        launch_with_device_table<kDepth>(part, plan, op, stream);
        break;
    }
  }
}

}  // namespace fastamp::kernels::cuda
