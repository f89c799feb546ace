// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums of squares of arrays that the first cache level holds.
//
// Sixteen sums, added pairwise at the end: the order does not depend on threads or instruction set.
// They are vectors so that they stay in registers; as an array, or as vectors wider than those of
// the processor, they go through memory, which for a gradient of 16 elements is half of the time.

#include "kernels/cpu/conversions.h"
#include "kernels/functors/norm.h"

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace fastamp::kernels::cpu {

/// kBytes of numbers that the compiler maps to whatever vectors the instruction set has. Aligned
/// like a single number and allowed to alias any array, so that arrays are loaded and stored
/// through it directly: GCC splits up a memcpy.
template <typename T, std::size_t kBytes>
struct Vector {
  using type __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias)) = T;
};
using TwoSums __attribute__((vector_size(2 * sizeof(double)))) = double;
struct FourSums {
  TwoSums low{};
  TwoSums high{};
};

/// Adds the squares of four elements to four sums.
template <typename T>
FASTAMP_ALWAYS_INLINE void add_squares(FourSums& sums, const T* data) {
  const auto& four = *reinterpret_cast<const Vector<T, 4 * sizeof(T)>::type*>(data);
  const auto wide = __builtin_convertvector(four, Vector<double, 4 * sizeof(double)>::type);
  const TwoSums low{wide[0], wide[1]};
  const TwoSums high{wide[2], wide[3]};
  sums.low += low * low;
  sums.high += high * high;
}

#ifdef FASTAMP_X86_TARGETS
/// sum_squares() of fp32 with AVX2, to the bit. GCC splits 32-byte vectors before it inlines their
/// function into one whose target has them: three instructions instead of one.
struct Avx2Squares {
  template <bool kAhead>
  FASTAMP_TARGET_AVX2 static double sum(const float* data, std::int64_t n) {
    __m256d a = _mm256_setzero_pd();
    __m256d b = a;
    __m256d c = a;
    __m256d d = a;
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      if constexpr (kAhead) {
        __builtin_prefetch(data + n + i / 2);
      }
      a = plus_squares(a, data + i);
      b = plus_squares(b, data + i + 4);
      c = plus_squares(c, data + i + 8);
      d = plus_squares(d, data + i + 12);
    }
    if (i < n) {
      float remainder[16] = {};
      for (std::int64_t k = 0; i + k < n; ++k) {
        remainder[k] = data[i + k];
      }
      a = plus_squares(a, remainder);
      b = plus_squares(b, remainder + 4);
      c = plus_squares(c, remainder + 8);
      d = plus_squares(d, remainder + 12);
    }
    const __m256d half = _mm256_add_pd(_mm256_add_pd(a, c), _mm256_add_pd(b, d));
    const __m128d two =
        _mm_add_pd(_mm256_castpd256_pd128(half), _mm256_extractf128_pd(half, 1));  // 0+2, 1+3
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

 private:
  FASTAMP_TARGET_AVX2 static __m256d plus_squares(__m256d sums, const float* data) {
    const __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(data));
    return _mm256_add_pd(sums, _mm256_mul_pd(wide, wide));
  }
};
#endif

/// Sum of the squares of n elements, fp32 or fp64; see square(). Convert: the instruction set, see
/// conversions.h. kAhead: prefetches the first half of the n elements that follow these.
template <typename Convert, typename T, bool kAhead = false>
FASTAMP_ALWAYS_INLINE double sum_squares(const T* data, std::int64_t n) {
#ifdef FASTAMP_X86_TARGETS
  if constexpr (std::is_same_v<Convert, Avx2Convert> && std::is_same_v<T, float>) {
    return Avx2Squares::sum<kAhead>(data, n);
  }
#endif
  // Independent sums hide the latency of the additions.
  FourSums a;
  FourSums b;
  FourSums c;
  FourSums d;
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    if constexpr (kAhead) {
      __builtin_prefetch(data + n + i / 2);
    }
    add_squares(a, data + i);
    add_squares(b, data + i + 4);
    add_squares(c, data + i + 8);
    add_squares(d, data + i + 12);
  }
  if (i < n) {  // Zeros add nothing to sums that are not negative.
    T remainder[16] = {};
    for (std::int64_t k = 0; i + k < n; ++k) {
      remainder[k] = data[i + k];
    }
    add_squares(a, remainder);
    add_squares(b, remainder + 4);
    add_squares(c, remainder + 8);
    add_squares(d, remainder + 12);
  }
  const TwoSums two = ((a.low + c.low) + (b.low + d.low)) + ((a.high + c.high) + (b.high + d.high));
  return two[0] + two[1];
}

/// Calls fn(fp32 or fp64 array, length) with the elements [begin, end), one chunk at most.
template <typename Convert, typename Fn>
FASTAMP_ALWAYS_INLINE auto with_wide(c10::ScalarType dtype, const void* base, std::int64_t begin,
                                     std::int64_t end, const Fn& fn) {
  const auto n = end - begin;
  if (dtype == c10::kFloat) {
    return fn(static_cast<const float*>(base) + begin, n);
  }
  if (dtype == c10::kDouble) {
    return fn(static_cast<const double*>(base) + begin, n);
  }
  alignas(64) float block[kNormChunkNumel];
  if (dtype == c10::kHalf) {
    Convert::widen(static_cast<const c10::Half*>(base) + begin, block, n);
  } else {
    Convert::widen(static_cast<const c10::BFloat16*>(base) + begin, block, n);
  }
  return fn(static_cast<const float*>(block), n);
}

}  // namespace fastamp::kernels::cpu
