// SPDX-License-Identifier: Apache-2.0
#pragma once

// fp16 and bf16 arrays to fp32 and back, rounding to nearest even, one struct per target
// with the same two functions per dtype. Kernels convert a block that fits the first cache level,
// run their arithmetic on it in fp32, and convert back.

#include "kernels/cpu/targets.h"
#include "kernels/functors/noise.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#ifdef FASTAMP_X86_TARGETS
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fastamp::kernels::cpu {

/// bf16 is the upper half of fp32. Branch-free, so that the compiler vectorises it anywhere.
FASTAMP_ALWAYS_INLINE void widen_bf16(const c10::BFloat16* in, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = std::uint32_t{in[i].x} << 16U;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

FASTAMP_ALWAYS_INLINE void narrow_bf16(const float* in, c10::BFloat16* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, in + i, sizeof(bits));
    // Adding just under half a unit, plus the lowest kept bit, rounds ties to even. A NaN could
    // carry into inf that way: it becomes the canonical NaN, as in c10.
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U;
    const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
    out[i].x = static_cast<std::uint16_t>(is_nan ? 0x7fc0U : rounded);
  }
}

/// Rounds elements of the m-th moment stochastically, the first of them being number `index`.
FASTAMP_ALWAYS_INLINE void narrow_noisily(const float* in, c10::BFloat16* out, std::int64_t n,
                                          const Noise& noise, std::size_t m, std::int64_t index) {
  const Noise of_tensor = noise;
  const auto first = static_cast<std::uint32_t>(index);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t drawn = of_tensor.of_moment(first + static_cast<std::uint32_t>(i), m);
    out[i].x = round_stochastically(in[i], drawn);
  }
}

/// Converts a tensor whose order turns; the first of them lies at `place`.
FASTAMP_ALWAYS_INLINE void narrow_turned(const float* in, c10::BFloat16* out, std::int64_t n,
                                         const Noise& noise, std::size_t m, std::int64_t place,
                                         ElementOrder order) {
  const auto inside =
      static_cast<std::uint64_t>(place) % (static_cast<std::uint64_t>(order.rows) * order.columns);
  auto column = static_cast<std::uint32_t>(inside / order.rows);
  auto row = static_cast<std::uint32_t>(inside % order.rows);
  auto matrix = static_cast<std::uint32_t>(static_cast<std::uint64_t>(place) - inside);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t index = matrix + row * order.columns + column;
    out[i].x = round_stochastically(in[i], noise.of_moment(index, m));
    if (++row == order.rows) {
      row = 0;
      if (++column == order.columns) {
        column = 0;
        matrix += order.rows * order.columns;
      }
    }
  }
}

struct BaselineConvert {
  static void widen(const c10::BFloat16* in, float* out, std::int64_t n) { widen_bf16(in, out, n); }
  static void narrow(const float* in, c10::BFloat16* out, std::int64_t n) {
    narrow_bf16(in, out, n);
  }
  static void widen(const c10::Half* in, float* out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<float>(in[i]);
    }
  }
  static void narrow(const float* in, c10::Half* out, std::int64_t n) {
#ifdef __aarch64__
    // GCC vectorises the other conversions and not this one.
    std::int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      vst1_u16(&out[i].x, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(in + i))));
    }
    for (; i < n; ++i) {
      out[i] = c10::Half(static_cast<float16_t>(in[i]));
    }
#else
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = c10::Half(in[i]);
    }
#endif
  }
};

#ifdef FASTAMP_X86_TARGETS
/// Serves AVX-512 too: twice the width gained nothing here.
struct Avx2Convert {
  FASTAMP_TARGET_AVX2 static void widen(const c10::BFloat16* in, float* out, std::int64_t n) {
    widen_bf16(in, out, n);
  }
  FASTAMP_TARGET_AVX2 static void narrow(const float* in, c10::BFloat16* out, std::int64_t n) {
    narrow_bf16(in, out, n);
  }
  FASTAMP_TARGET_AVX2 static void widen(const c10::Half* in, float* out, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(out + i, widen8(in + i));
    }
    if (i < n) {
      c10::Half lanes[8] = {};
      std::memcpy(lanes, in + i, static_cast<std::size_t>(n - i) * sizeof(c10::Half));
      alignas(32) float wide[8];
      _mm256_store_ps(wide, widen8(lanes));
      std::memcpy(out + i, wide, static_cast<std::size_t>(n - i) * sizeof(float));
    }
  }
  FASTAMP_TARGET_AVX2 static void narrow(const float* in, c10::Half* out, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      narrow8(_mm256_loadu_ps(in + i), out + i);
    }
    if (i < n) {
      alignas(32) float wide[8] = {};
      std::memcpy(wide, in + i, static_cast<std::size_t>(n - i) * sizeof(float));
      c10::Half lanes[8];
      narrow8(_mm256_load_ps(wide), lanes);
      std::memcpy(out + i, lanes, static_cast<std::size_t>(n - i) * sizeof(c10::Half));
    }
  }

 private:
  FASTAMP_TARGET_AVX2 static __m256 widen8(const c10::Half* in) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
  }
  FASTAMP_TARGET_AVX2 static void narrow8(__m256 in, c10::Half* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_cvtps_ph(in, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
#endif

}  // namespace fastamp::kernels::cpu
