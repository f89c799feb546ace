// SPDX-License-Identifier: Apache-2.0
// Sums of squares of chunks, and counts of what is not finite in them; sum of squares and unscaling
// of many small fp32 arrays in one loop.
//
// Traffic per element: one read and, of small arrays unless the factor is 1, one write. Numerics:
// kernels/functors/norm.h, kernels/cpu/squares.h.

#include "kernels/cpu/grad_sums.h"

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/squares.h"
#include "kernels/functors/norm.h"
#include "kernels/functors/unscale.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace fastamp::kernels::cpu {
namespace {

template <typename Convert>
struct SumOf {
  template <typename T>
  FASTAMP_ALWAYS_INLINE double operator()(const T* data, std::int64_t n) const {
    return sum_squares<Convert>(data, n);
  }
};

struct ChunkSum {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE double run(at::ScalarType dtype, const void* base,
                                          std::int64_t begin, std::int64_t end) {
    // A functor, not a lambda: a lambda's body would not be inlined into each target.
    return with_wide<Convert>(dtype, base, begin, end, SumOf<Convert>{});
  }
};

struct CountNonFinite {
  float inv_scale;
  std::uint32_t overflow;

  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE NonFinite run(at::ScalarType dtype, const void* base,
                                             std::int64_t begin, std::int64_t end, float inv_scale,
                                             std::uint32_t overflow) {
    return with_wide<Convert>(dtype, base, begin, end, CountNonFinite{inv_scale, overflow});
  }
  FASTAMP_ALWAYS_INLINE NonFinite operator()(const float* data, std::int64_t n) const {
    return count(data, n, overflow);
  }
  FASTAMP_ALWAYS_INLINE NonFinite operator()(const double* data, std::int64_t n) const {
    return count(data, n, kOverflowBits<double>);
  }

 private:
  template <typename T, typename Bits>
  FASTAMP_ALWAYS_INLINE NonFinite count(const T* data, std::int64_t n, Bits from) const {
    const Unscale<T> unscale{static_cast<T>(inv_scale)};
    NonFinite count;
    for (std::int64_t i = 0; i < n; ++i) {
      count.count(data[i], magnitude_bits(unscale(data[i])) >= from);
    }
    return count;
  }
};

struct SmallArrays {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE std::size_t run(KnownArrays arrays, std::size_t first, float factor,
                                               double bound, double& total) {
    const Unscale<float> unscale{factor};
    const bool rewrites = unscale.rewrites();
    double sums = total;
    auto i = first;
    for (; i < arrays.size(); ++i) {
      const HostArray& array = arrays[i];
      if (array.dtype != c10::kFloat || array.numel >= kNormChunkNumel || array.data == nullptr) {
        break;
      }
      prefetch_after(arrays, i);
      auto* const data = static_cast<float*>(array.data);
      const double sum = sum_squares<Convert>(data, array.numel);
      if (!is_safe(sum, bound)) [[unlikely]] {
        break;
      }
      sums += sum;
      if (rewrites) {
        for (std::int64_t k = 0; k < array.numel; ++k) {
          data[k] = unscale(data[k]);
        }
      }
    }
    total = sums;
    return i;
  }
};

}  // namespace

bool worth_threads(std::int64_t numel, std::size_t tensors) {
  if (at::get_num_threads() == 1 || at::in_parallel_region()) {
    return false;
  }
  const auto needed = kThreadsNumelPerTensor * static_cast<std::int64_t>(tensors);
  return numel > std::max(kThreadsNumel, needed);
}

GradArrays::GradArrays(const char* function, at::TensorList grads, KnownArrays known, bool writes)
    : grads_(grads), arrays_(known), writes_(writes) {
  if (known.empty()) {
    own_.reserve(grads.size());
    for (std::size_t i = 0; i < grads.size(); ++i) {
      const at::Tensor& grad = grads[i];
      if (grad.is_non_overlapping_and_dense()) [[likely]] {
        own_.push_back(array_of(grad, writes));
      } else {
        strided_.push_back(i);
        if (writes) {
          dense_.push_back(at::empty(grad.sizes(), grad.options()));
        }
        own_.push_back({.data = nullptr, .numel = grad.numel(), .dtype = grad.scalar_type()});
      }
      // The storage's address: that of a view's first number is an offset from null.
      TORCH_CHECK_VALUE(grad.storage().data() != nullptr || grad.numel() == 0, function,
                        ": expected grads[", i, "] of shape ", grad.sizes(),
                        " to have memory, got one whose storage is empty");
    }
    arrays_ = own_;
  }
  for (const auto& array : arrays_) {
    numel_ += array.numel;
  }
}

HostArray GradArrays::array_of(const at::Tensor& dense, bool writes) {
  return {.data = writes ? dense.mutable_data_ptr() : const_cast<void*>(dense.const_data_ptr()),
          .numel = dense.numel(),
          .dtype = dense.scalar_type()};
}

ChunkSumFn* chunk_sum_function() {
  static auto* const best = select_target<ChunkSum, ChunkSumFn>();
  return best;
}

void NonFiniteTally::look(std::size_t index, const HostArray& grad, std::int64_t begin,
                          std::int64_t end, std::uint32_t overflow) {
  using Count =
      NonFinite(at::ScalarType, const void*, std::int64_t, std::int64_t, float, std::uint32_t);
  static auto* const best = select_target<CountNonFinite, Count>();
  const auto count = best(grad.dtype, grad.data, begin, end, inv_scale_, overflow);
  if (count.inf == 0 && count.nan == 0) {
    return;  // The sum is only a bound of the greatest product.
  }
  const std::scoped_lock lock(mutex_);
  clear();
  found_ = true;
  if (counts_ != nullptr) {
    counts_[2 * index] += count.inf;
    counts_[2 * index + 1] += count.nan;
  }
}

void NonFiniteTally::clear() {
  if (!found_ && counts_ != nullptr) {
    std::fill_n(counts_, 2 * grads_, 0);
  }
}

SmallArraysFn* small_arrays_function() {
  static auto* const best = select_target<SmallArrays, SmallArraysFn>();
  return best;
}

}  // namespace fastamp::kernels::cpu
