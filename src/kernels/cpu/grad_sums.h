// SPDX-License-Identifier: Apache-2.0
#pragma once

// Passes over lists of gradients that add up squares.
//
// Each dense gradient is a flat array whatever the order of its dimensions; a strided one goes
// through a contiguous copy. All are cut into chunks of kNormChunkNumel elements. Short lists and
// lists of small tensors are walked by the calling thread, others spread over at::parallel_for,
// which leaves one fp64 per chunk to be added in order: the order of all sums depends on the sizes
// of the tensors alone. Strided gradients go first then, which can be seen only where they share
// memory with others.

#include "kernels/amp_args.h"
#include "kernels/functors/norm.h"
#include "kernels/host_array.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace fastamp::kernels::cpu {

/// Up to this many elements (about 50 us of fp32) waking other threads costs more than it saves.
inline constexpr std::int64_t kThreadsNumel = 262144;

/// Bound: with fewer elements per tensor, preparing the cuts costs what the threads would save.
inline constexpr std::int64_t kThreadsNumelPerTensor = 256;

/// Threads pay for elements, not for tensors: walking the list is serial in any case.
bool worth_threads(std::int64_t numel, std::size_t tensors);

/// Sum of squares of the elements [begin, end), one chunk at most, of a dense array.
using ChunkSumFn = double(at::ScalarType, const void*, std::int64_t, std::int64_t);
ChunkSumFn* chunk_sum_function();

/// Adds the squares of the arrays from `first` on to `total`, one sum after the other, and
/// multiplies each array by a factor unless that is 1. Stops at the first array that has no
/// address, is not fp32, is not shorter than a chunk or has a sum that is not below the bound
/// (safe_squares()).
/// Returns the place of that array, of which nothing was added or written, or the number of arrays.
///
/// Does the work of visiting chunks one by one in a single call: for 16 elements the call, the
/// saved registers and the choice of dtype are as much work as the numbers.
using SmallArraysFn = std::size_t(KnownArrays arrays, std::size_t first, float factor, double bound,
                                  double& total);
SmallArraysFn* small_arrays_function();

/// kOverflowBits of a gradient's dtype; of fp64 those of fp32, which are not used.
inline std::uint32_t overflow_bits(at::ScalarType dtype) {
  if (dtype == at::kHalf) {
    return kOverflowBits<c10::Half>;
  }
  return dtype == at::kBFloat16 ? kOverflowBits<c10::BFloat16> : kOverflowBits<float>;
}

/// Collects counts of elements that are not finite, or have a product with inv_scale that is not,
/// from all threads of a pass.
class NonFiniteTally {
 public:
  /// @param counts  [grads][2], of which all is replaced once an element is found; null: not
  ///     counted. Needs no memory of its own: that could be missing while gradients are written.
  NonFiniteTally(float inv_scale, std::int64_t* counts, std::size_t grads)
      : inv_scale_(inv_scale), counts_(counts), grads_(grads) {}

  /// Called for a chunk whose sum is not safe, before it is written.
  /// @param overflow  From which magnitude on a product is not finite where it goes.
  void look(std::size_t index, const HostArray& grad, std::int64_t begin, std::int64_t end,
            std::uint32_t overflow);
  /// Whether an element was found that is not finite; not to be asked while threads look.
  bool found() const { return found_; }
  /// Replaces the counts by zeros, unless an element was found.
  void clear();

 private:
  float inv_scale_;
  std::int64_t* counts_;
  std::size_t grads_;
  std::mutex mutex_;
  bool found_ = false;
};

/// The gradients of a list as arrays for the length of a pass.
class GradArrays {
 public:
  /// @param function  The op, for messages.
  /// @param known     The arrays if the caller has them: empty otherwise.
  /// @param writes    Whether they will be written. What is only read must not materialise a
  ///                  copy-on-write tensor.
  /// @throws c10::ValueError for a gradient whose memory was freed.
  GradArrays(const char* function, at::TensorList grads, KnownArrays known, bool writes);
  GradArrays(const GradArrays&) = delete;
  GradArrays& operator=(const GradArrays&) = delete;
  GradArrays(GradArrays&&) = delete;
  GradArrays& operator=(GradArrays&&) = delete;
  ~GradArrays() = default;

  /// Arrays, as many as there are gradients. A strided one has a length but no address.
  KnownArrays arrays() const { return arrays_; }
  const std::vector<std::size_t>& strided() const { return strided_; }
  /// Whether more than the calling thread should walk them.
  bool worth_threads() const { return cpu::worth_threads(numel_, arrays_.size()); }

  /// Calls visit(array) for a gradient; for a strided one with a copy, which is copied back if it
  /// is written; its memory is there from the start then, since it could be missing when other
  /// gradients are written. One gradient after the other: strided ones may share memory.
  template <typename Visit>
  void visit(std::size_t index, const Visit& visit) const {
    if (arrays_[index].data != nullptr) {
      visit(arrays_[index]);
      return;
    }
    if (!writes_) {
      visit(array_of(grads_[index].contiguous(), /*writes=*/false));
      return;
    }
    const auto place = std::ranges::lower_bound(strided_, index) - strided_.begin();
    const auto& dense = dense_[static_cast<std::size_t>(place)];
    dense.copy_(grads_[index]);
    visit(array_of(dense, /*writes=*/true));
    grads_[index].copy_(dense);
  }

 private:
  static HostArray array_of(const at::Tensor& dense, bool writes);

  at::TensorList grads_;
  std::vector<HostArray> own_;
  std::vector<std::size_t> strided_;  ///< Ascending.
  std::vector<at::Tensor> dense_;     ///< For each strided one, if it is written.
  KnownArrays arrays_;
  std::int64_t numel_ = 0;
  bool writes_;
};

/// Visits the chunks of one gradient and adds their sums to `total`, in order.
template <typename Visit>
void sum_array(const HostArray& array, std::size_t index, const Visit& visit, double& total) {
  for (std::int64_t at = 0; at < array.numel; at += kNormChunkNumel) {
    total += visit(index, array, at, std::min(at + kNormChunkNumel, array.numel));
  }
}

template <typename Visit>
double sum_serial(const GradArrays& grads, float factor, double bound, const Visit& visit) {
  static auto* const take_small_arrays = small_arrays_function();
  const auto arrays = grads.arrays();
  double total = 0.0;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    i = take_small_arrays(arrays, i, factor, bound, total);
    if (i < arrays.size() && arrays[i].numel > 0) {
      grads.visit(i, [&](const HostArray& array) { sum_array(array, i, visit, total); });
    }
  }
  return total;
}

template <typename Visit>
double sum_parallel(const GradArrays& grads, const Visit& visit) {
  const auto arrays = grads.arrays();
  std::vector<std::int64_t> first_chunk{0};
  first_chunk.reserve(arrays.size() + 1);
  for (const auto& array : arrays) {
    first_chunk.push_back(first_chunk.back() +
                          (array.numel + kNormChunkNumel - 1) / kNormChunkNumel);
  }
  std::vector<double> partial(static_cast<std::size_t>(first_chunk.back()));
  for (const auto i : grads.strided()) {
    auto next = partial.begin() + first_chunk[i];
    grads.visit(i, [&](const HostArray& array) {
      for (std::int64_t at = 0; at < array.numel; at += kNormChunkNumel) {
        *next++ = visit(i, array, at, std::min(at + kNormChunkNumel, array.numel));
      }
    });
  }
  at::parallel_for(0, first_chunk.back(), kThreadsNumel / 2 / kNormChunkNumel,
                   [&](std::int64_t begin, std::int64_t end) {
                     const auto after = std::ranges::upper_bound(first_chunk, begin);
                     auto i = static_cast<std::size_t>(after - first_chunk.begin() - 1);
                     for (auto c = begin; c < end; ++c) {
                       while (first_chunk[i + 1] <= c) {
                         ++i;
                       }
                       if (arrays[i].data == nullptr) {
                         continue;  // Strided: summed above.
                       }
                       const auto at = (c - first_chunk[i]) * kNormChunkNumel;
                       partial[static_cast<std::size_t>(c)] =
                           visit(i, arrays[i], at, std::min(at + kNormChunkNumel, arrays[i].numel));
                     }
                   });
  double total = 0.0;
  for (const double chunk : partial) {
    total += chunk;
  }
  return total;
}

/// Calls visit(index, array, begin, end) for every chunk, from several threads where that pays, and
/// adds what it returns in the order of the chunks. Small fp32 arrays whose sum is below `bound`
/// are multiplied by `factor` and summed without it.
template <typename Visit>
double sum_chunks(const GradArrays& grads, float factor, double bound, const Visit& visit) {
  return grads.worth_threads() ? sum_parallel(grads, visit)
                               : sum_serial(grads, factor, bound, visit);
}

}  // namespace fastamp::kernels::cpu
