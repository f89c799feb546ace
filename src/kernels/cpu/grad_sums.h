#pragma once

// Passes over lists of gradients that add up squares.
//
// Each dense gradient is a flat array whatever the order of its dimensions; a strided one goes
// through a contiguous copy. All are cut into chunks of kNormChunkNumel elements. Short lists and
// lists of small tensors are walked by the calling thread with nothing allocated, others spread
// over at::parallel_for, which leaves one fp64 per chunk to be added in order: the order of all
// sums depends on the sizes of the tensors alone.

#include "kernels/functors/norm.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace fastamp::kernels::cpu {

/// Up to this many elements (about 50 us of fp32) waking other threads costs more than it saves.
inline constexpr std::int64_t kThreadsNumel = 262144;

/// With fewer elements per tensor than this, preparing the cuts costs what the threads would save.
inline constexpr std::int64_t kThreadsNumelPerTensor = 256;

/// Threads pay for elements, not for tensors: walking the list is serial in any case.
bool worth_threads(std::int64_t numel, std::size_t tensors);

/// A gradient's data is three dependent loads away (tensor, storage, data); with thousands of small
/// tensors their latency is most of the time, so each is started some tensors before the next.
inline void prefetch_ahead(at::TensorList grads, std::size_t i) {
  constexpr std::size_t kTensorAhead = 24;
  constexpr std::size_t kStorageAhead = 16;
  constexpr std::size_t kDataAhead = 8;
  if (i + kTensorAhead < grads.size()) {
    const void* const tensor = grads[i + kTensorAhead].unsafeGetTensorImpl();
    __builtin_prefetch(tensor);  // Its storage is in the first of three cache lines, and in the
    // last there are dtype, device and size.
    __builtin_prefetch(static_cast<const char*>(tensor) + sizeof(c10::TensorImpl));
  }
  if (i + kStorageAhead < grads.size()) {
    const auto& storage = grads[i + kStorageAhead].unsafeGetTensorImpl()->unsafe_storage();
    __builtin_prefetch(storage.unsafeGetStorageImpl());
  }
  if (i + kDataAhead < grads.size()) {
    const auto& storage = grads[i + kDataAhead].unsafeGetTensorImpl()->unsafe_storage();
    if (const auto* const impl = storage.unsafeGetStorageImpl(); impl != nullptr) {
      __builtin_prefetch(impl->data());
    }
  }
}

/// Sum of squares of the elements [begin, end), one chunk at most, of a dense array.
using ChunkSumFn = double(at::ScalarType, const void*, std::int64_t, std::int64_t);
ChunkSumFn* chunk_sum_function();

/// How many of the elements [begin, end) are not finite.
NonFinite count_non_finite(at::ScalarType dtype, const void* base, std::int64_t begin,
                           std::int64_t end);

/// Collects counts of non-finite elements from all threads of a pass.
class Tally {
 public:
  explicit Tally(bool wanted) : wanted_(wanted) {}

  /// Called for a chunk whose sum is not finite, before it is written.
  void look(std::size_t grad, at::ScalarType dtype, const void* base, std::int64_t begin,
            std::int64_t end);
  /// Replaces all of counts[grads][2] if anything was found.
  void write(std::int64_t* counts, std::size_t grads) const;

 private:
  bool wanted_;
  std::mutex mutex_;
  std::vector<std::pair<std::size_t, NonFinite>> found_;
};

/// A gradient in dense memory for the length of a pass.
class DenseGrad {
 public:
  DenseGrad(const at::Tensor& grad, bool writes)
      : dense_(grad.is_non_overlapping_and_dense()
                   ? c10::MaybeOwned<at::Tensor>::borrowed(grad)
                   : c10::MaybeOwned<at::Tensor>::owned(grad.contiguous())),
        // What is only read must not materialise a copy-on-write tensor.
        data_(writes ? dense_->mutable_data_ptr() : const_cast<void*>(dense_->const_data_ptr())) {}

  void* data() const { return data_; }
  /// Brings what was computed in a copy to where it belongs.
  void copy_back(const at::Tensor& grad) const {
    if (!dense_.unsafeIsBorrowed()) {
      grad.copy_(*dense_);
    }
  }

 private:
  c10::MaybeOwned<at::Tensor> dense_;
  void* data_;
};

template <typename Visit>
double sum_serial(at::TensorList grads, bool writes, const Visit& visit) {
  double total = 0.0;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    prefetch_ahead(grads, i);
    const at::Tensor& grad = grads[i];
    const DenseGrad dense(grad, writes);
    const auto numel = grad.numel();
    for (std::int64_t at = 0; at < numel; at += kNormChunkNumel) {
      total +=
          visit(i, grad.scalar_type(), dense.data(), at, std::min(at + kNormChunkNumel, numel));
    }
    if (writes) {
      dense.copy_back(grad);
    }
  }
  return total;
}

template <typename Visit>
double sum_parallel(at::TensorList grads, bool writes, const Visit& visit) {
  std::vector<DenseGrad> dense;
  std::vector<std::int64_t> first_chunk{0};
  dense.reserve(grads.size());
  first_chunk.reserve(grads.size() + 1);
  for (const auto& grad : grads) {
    dense.emplace_back(grad, writes);
    first_chunk.push_back(first_chunk.back() +
                          (grad.numel() + kNormChunkNumel - 1) / kNormChunkNumel);
  }
  std::vector<double> partial(static_cast<std::size_t>(first_chunk.back()));
  at::parallel_for(0, first_chunk.back(), kThreadsNumel / 2 / kNormChunkNumel,
                   [&](std::int64_t begin, std::int64_t end) {
                     const auto after = std::ranges::upper_bound(first_chunk, begin);
                     auto i = static_cast<std::size_t>(after - first_chunk.begin() - 1);
                     for (auto c = begin; c < end; ++c) {
                       while (first_chunk[i + 1] <= c) {
                         ++i;
                       }
                       const auto at = (c - first_chunk[i]) * kNormChunkNumel;
                       partial[static_cast<std::size_t>(c)] =
                           visit(i, grads[i].scalar_type(), dense[i].data(), at,
                                 std::min(at + kNormChunkNumel, grads[i].numel()));
                     }
                   });
  for (std::size_t i = 0; writes && i < dense.size(); ++i) {
    dense[i].copy_back(grads[i]);
  }
  double total = 0.0;
  for (const double chunk : partial) {
    total += chunk;
  }
  return total;
}

/// Calls visit(index, dtype, base, begin, end) for every chunk, from several threads where that
/// pays, and adds what it returns in the order of the chunks. `numel` is the number of elements of
/// all gradients; `writes` says that visits change what they see.
template <typename Visit>
double sum_chunks(at::TensorList grads, std::int64_t numel, bool writes, const Visit& visit) {
  return worth_threads(numel, grads.size()) ? sum_parallel(grads, writes, visit)
                                            : sum_serial(grads, writes, visit);
}

}  // namespace fastamp::kernels::cpu
