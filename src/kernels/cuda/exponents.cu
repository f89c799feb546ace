// SPDX-License-Identifier: Apache-2.0
// CUDA kernel of fastamp::count_exponents_.
//
// Layout: each dense tensor is a flat array whatever the order of its dimensions; a strided one
// goes through a contiguous copy that joins the same launch. Mapping: a warp per run of chunks
// (launch_plan.h), lane l takes the elements l, l + 32, ...; each warp counts in 258 32-bit numbers
// of its own in shared memory (8 KiB per block), which it adds to the table at the end of a range.
// Traffic per counted element: one read; per range at most 2 KiB of atomic additions. Numerics:
// counts are exact, and atomic sums and maxima of integers give the same table in any order
// (kernels/functors/exponents.h). A range has fewer than 2^32 elements: it is a part of what one of
// a device's thousands of warps gets.
// For diagnosis: loads are of single elements, and lanes that meet the same exponent wait for each
// other. Proof: tests/cpp/cuda_on_cpu/test_exponents.cpp; speed not measured.

#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/cuda/squares_launch.h"
#include "kernels/exponents.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace fastamp::kernels {
namespace {

using Word = unsigned long long;

/// Lists of an entry: tensor, its row, its count of zeros or null; and the tensor's number, which
/// is no pointer.
struct ExponentOp {
  static constexpr int kThreads = 1536;  // 40 registers each

  BlockSample sample;

  struct Thread {};

  __device__ Thread begin() const { return {}; }
  __device__ void end(Thread& /*thread*/) const {}

  template <typename Table>
  __device__ void range(Thread& /*thread*/, const Table& table, const cuda::ChunkRange& range,
                        int lane) const {
    const void* base = table.pointer(0, range.entry);
    auto* row = static_cast<Word*>(table.pointer(1, range.entry));
    auto* zeros = static_cast<Word*>(table.pointer(2, range.entry));
    const auto number = reinterpret_cast<std::int64_t>(table.pointer(3, range.entry));
    __builtin_assume(__isGlobal(base));
    switch (static_cast<at::ScalarType>(cuda::packed_tag(table.packed[range.entry]))) {
      case at::kFloat:
        return run(static_cast<const float*>(base), number, row, zeros, range, lane);
      case at::kHalf:
        return run(static_cast<const c10::Half*>(base), number, row, zeros, range, lane);
      default:
        return run(static_cast<const c10::BFloat16*>(base), number, row, zeros, range, lane);
    }
  }

 private:
  /// Whether a range has a block of the sample. The same for the whole warp.
  __device__ __forceinline__ bool has_sample(std::int64_t number,
                                             const cuda::ChunkRange& range) const {
    const auto first = range.begin / BlockSample::kBlockNumel;
    const auto last = (range.end - 1) / BlockSample::kBlockNumel;
    for (auto block = first; block <= last; ++block) {
      if (sample.takes(number, block)) {
        return true;
      }
    }
    return false;
  }

  template <typename scalar_t>
  __device__ __forceinline__ void run(const scalar_t* base, std::int64_t number, Word* row,
                                      Word* zeros, const cuda::ChunkRange& range, int lane) const {
    if (!has_sample(number, range)) {
      return;
    }
    __shared__ unsigned bins_of_warps[cuda::kBlockWarps][kExponentBins];
    unsigned* const bins = bins_of_warps[threadIdx.x / cuda::kWarpSize];
    for (int i = lane; i < kExponentBins; i += cuda::kWarpSize) {
      bins[i] = 0;
    }
    __syncwarp();  // the zeros are there
    unsigned greatest = 0;
    unsigned least = kInfBits<float>;
    for (std::int64_t at = range.begin; at < range.end;) {
      const auto block = at / BlockSample::kBlockNumel;
      const std::int64_t stop = min((block + 1) * BlockSample::kBlockNumel, range.end);
      if (!sample.takes(number, block)) {
        at = stop;
        continue;
      }
#pragma unroll 4
      for (std::int64_t i = at + lane; i < stop; i += cuda::kWarpSize) {
        const unsigned bits = magnitude_bits(static_cast<float>(base[i]));
        atomicAdd(bins + exponent_column(bits), 1U);
        if (bits < kInfBits<float>) {
          greatest = bits > greatest ? bits : greatest;
          least = bits != 0 && bits < least ? bits : least;
        }
      }
      at = stop;
    }
    __syncwarp();  // all lanes have counted
    for (int i = lane; i < kExponentBins; i += cuda::kWarpSize) {
      if (bins[i] != 0) {
        atomicAdd(row + i, static_cast<Word>(bins[i]));
      }
    }
    atomicMax(row + kGreatestColumn, static_cast<Word>(greatest));
    atomicMax(row + kLeastColumn, static_cast<Word>(kInfBits<float> - least));
    if (lane == 0 && zeros != nullptr && bins[kZeroColumn] != 0) {
      atomicAdd(zeros, static_cast<Word>(bins[kZeroColumn]));
    }
    __syncwarp();  // all lanes have read, before the next range clears
  }
};

}  // namespace

void count_exponents_cuda(const ExponentArgs& args) {
  const c10::cuda::CUDAGuard guard(args.exponents.device());
  // The op has no autograd kernel; the copies of strided tensors must not be recorded either.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto list = cuda::gather_grads(args.tensors, /*writes=*/false);
  auto* const rows = args.exponents.mutable_data_ptr<std::int64_t>();
  auto* const zeros =
      args.zeros && args.zeros->defined() ? args.zeros->mutable_data_ptr<std::int64_t>() : nullptr;
  const std::size_t stride = shares_row(args) ? 0 : kExponentColumns;
  std::vector<cuda::TensorEntry<4>> entries;
  entries.reserve(list.grads.size());
  for (const auto& grad : list.grads) {
    entries.push_back(
        {{grad.data, rows + grad.index * stride, zeros == nullptr ? nullptr : zeros + grad.index,
          reinterpret_cast<void*>(grad.index)},
         grad.numel,
         static_cast<std::uint8_t>(grad.dtype)});
  }
  cuda::multi_tensor_apply(entries, ExponentOp{args.sample()});
}

}  // namespace fastamp::kernels
