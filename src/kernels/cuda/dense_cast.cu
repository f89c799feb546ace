// SPDX-License-Identifier: Apache-2.0
// CUDA kernel that casts many float32 tensors to 16 bits in one launch.
//
// Layout: dense tensors as flat arrays. Mapping: a warp per run of chunks (launch_plan.h); a lane
// takes eight neighbouring elements, two 128-bit loads and one 128-bit store; tensors that do not
// lie on 16-byte boundaries go element by element. Traffic per element: 4 bytes read, 2 written.
// Numerics: c10's conversion, so the bits of torch's own cast, whatever the launch shape.

#include "kernels/cuda/dense_cast.h"
#include "kernels/cuda/multi_tensor.cuh"

#include <c10/cuda/CUDAGuard.h>

#include <cstdint>
#include <vector>

namespace fastamp::kernels::cuda {
namespace {

template <typename to_t>
struct alignas(16) Eight {
  to_t lanes[8];
};

struct CastOp {
  /// Bound: with more, addresses and loop do not fit the registers. 48 KiB in flight per processor.
  static constexpr int kThreads = 1536;

  struct Thread {};

  __device__ Thread begin() const { return {}; }

  template <typename Table>
  __device__ void range(Thread& /*thread*/, const Table& table, const ChunkRange& range,
                        int lane) const {
    void* in = table.pointer(0, range.entry);
    void* out = table.pointer(1, range.entry);
    // Read from memory, the pointers have lost their address space; generic accesses are slower.
    __builtin_assume(__isGlobal(in));
    __builtin_assume(__isGlobal(out));
    const auto* from = static_cast<const float*>(in) + range.begin;
    const std::int64_t n = range.end - range.begin;
    if (static_cast<at::ScalarType>(packed_tag(table.packed[range.entry])) == at::kHalf) {
      run(from, static_cast<c10::Half*>(out) + range.begin, n, lane);
    } else {
      run(from, static_cast<c10::BFloat16*>(out) + range.begin, n, lane);
    }
  }

  __device__ void end(Thread& /*thread*/) const {}

 private:
  template <typename to_t>
  static __device__ __forceinline__ void run(const float* from, to_t* to, std::int64_t n,
                                             int lane) {
    const bool aligned =
        (reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to)) % 16 == 0;
    const std::int64_t groups = aligned ? n / 8 : 0;
    const auto* loads = reinterpret_cast<const float4*>(from);
    auto* stores = reinterpret_cast<Eight<to_t>*>(to);
    // Unrolled, it would hold more addresses and issue no load earlier: stores keep them in order.
#pragma unroll 1
    for (std::int64_t i = lane; i < groups; i += kWarpSize) {
      const float4 a = loads[2 * i];
      const float4 b = loads[2 * i + 1];
      stores[i] = {{static_cast<to_t>(a.x), static_cast<to_t>(a.y), static_cast<to_t>(a.z),
                    static_cast<to_t>(a.w), static_cast<to_t>(b.x), static_cast<to_t>(b.y),
                    static_cast<to_t>(b.z), static_cast<to_t>(b.w)}};
    }
#pragma unroll 1
    for (std::int64_t i = groups * 8 + lane; i < n; i += kWarpSize) {
      to[i] = static_cast<to_t>(from[i]);
    }
  }
};

}  // namespace

void cast_together(at::TensorList sources, at::TensorList casts) {
  std::vector<TensorEntry<2>> entries;
  entries.reserve(sources.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].numel() != 0) {
      // Only read through; the table has one pointer type.
      void* source = const_cast<void*>(sources[i].const_data_ptr());
      entries.push_back({{source, casts[i].mutable_data_ptr()},
                         sources[i].numel(),
                         static_cast<std::uint16_t>(casts[i].scalar_type())});
    }
  }
  if (!entries.empty()) {
    const c10::cuda::CUDAGuard guard(sources.front().device());
    multi_tensor_apply(entries, CastOp{});
  }
}

}  // namespace fastamp::kernels::cuda
