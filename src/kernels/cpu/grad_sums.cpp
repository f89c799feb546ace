// Sums of squares of chunks, and counts of what is not finite in them.
//
// Traffic per element: one read. Numerics: kernels/functors/norm.h; sixteen sums per chunk, added
// pairwise at its end, so the order does not depend on threads or instruction set.

#include "kernels/cpu/grad_sums.h"

#include "kernels/cpu/copies.h"

namespace fastamp::kernels::cpu {
namespace {

/// Independent sums in a chunk: two AVX-512 or four AVX2 vectors hide the latency of the additions.
constexpr std::int64_t kSums = 16;

template <typename T>
FASTAMP_HOST_DEVICE double sum_squares(const T* data, std::int64_t n) {
  double sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (std::int64_t k = 0; k < kSums; ++k) {
      sums[k] += square(data[i + k]);
    }
  }
  for (std::int64_t k = 0; i + k < n; ++k) {
    sums[k] += square(data[i + k]);
  }
  for (std::int64_t width = kSums / 2; width > 0; width /= 2) {
    for (std::int64_t k = 0; k < width; ++k) {
      sums[k] += sums[k + width];
    }
  }
  return sums[0];
}

/// Calls fn(fp32 or fp64 array, length) with the elements [begin, end), one chunk at most.
template <typename Convert, typename Fn>
FASTAMP_HOST_DEVICE auto with_wide(at::ScalarType dtype, const void* base, std::int64_t begin,
                                   std::int64_t end, const Fn& fn) {
  const auto n = end - begin;
  if (dtype == at::kFloat) {
    return fn(static_cast<const float*>(base) + begin, n);
  }
  if (dtype == at::kDouble) {
    return fn(static_cast<const double*>(base) + begin, n);
  }
  alignas(64) float block[kNormChunkNumel];
  if (dtype == at::kHalf) {
    Convert::widen(static_cast<const c10::Half*>(base) + begin, block, n);
  } else {
    Convert::widen(static_cast<const c10::BFloat16*>(base) + begin, block, n);
  }
  return fn(static_cast<const float*>(block), n);
}

struct ChunkSum {
  template <typename Convert>
  static FASTAMP_HOST_DEVICE double run(at::ScalarType dtype, const void* base, std::int64_t begin,
                                        std::int64_t end) {
    // A functor, not a lambda: a lambda's body would not be inlined into the copies.
    return with_wide<Convert>(dtype, base, begin, end, ChunkSum{});
  }
  template <typename T>
  FASTAMP_HOST_DEVICE double operator()(const T* data, std::int64_t n) const {
    return sum_squares(data, n);
  }
};

struct CountNonFinite {
  template <typename Convert>
  static FASTAMP_HOST_DEVICE NonFinite run(at::ScalarType dtype, const void* base,
                                           std::int64_t begin, std::int64_t end) {
    return with_wide<Convert>(dtype, base, begin, end, CountNonFinite{});
  }
  template <typename T>
  FASTAMP_HOST_DEVICE NonFinite operator()(const T* data, std::int64_t n) const {
    NonFinite count;
    for (std::int64_t i = 0; i < n; ++i) {
      count.count(data[i]);
    }
    return count;
  }
};

}  // namespace

bool worth_threads(at::TensorList grads) {
  if (at::get_num_threads() == 1 || at::in_parallel_region()) {
    return false;
  }
  std::int64_t numel = 0;
  for (const auto& grad : grads) {
    numel += grad.numel();
  }
  const auto needed = kThreadsNumelPerTensor * static_cast<std::int64_t>(grads.size());
  return numel > std::max(kThreadsNumel, needed);
}

ChunkSumFn* chunk_sum_function() {
  static auto* const best = best_copy<ChunkSum, ChunkSumFn>();
  return best;
}

NonFinite count_non_finite(at::ScalarType dtype, const void* base, std::int64_t begin,
                           std::int64_t end) {
  using Count = NonFinite(at::ScalarType, const void*, std::int64_t, std::int64_t);
  static auto* const best = best_copy<CountNonFinite, Count>();
  return best(dtype, base, begin, end);
}

void Tally::look(std::size_t grad, at::ScalarType dtype, const void* base, std::int64_t begin,
                 std::int64_t end) {
  if (!wanted_) {
    return;
  }
  const auto count = count_non_finite(dtype, base, begin, end);
  if (count.inf == 0 && count.nan == 0) {
    return;  // Squares of large fp64 numbers overflow.
  }
  const std::scoped_lock lock(mutex_);
  found_.emplace_back(grad, count);
}

void Tally::write(std::int64_t* counts, std::size_t grads) const {
  if (found_.empty()) {
    return;
  }
  std::fill_n(counts, 2 * grads, 0);
  for (const auto& [grad, count] : found_) {
    counts[2 * grad] += count.inf;
    counts[2 * grad + 1] += count.nan;
  }
}

}  // namespace fastamp::kernels::cpu
