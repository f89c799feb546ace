// SPDX-License-Identifier: Apache-2.0
#pragma once

// Targets of the CPU kernels: the instruction sets that their loops are compiled for. The library
// is compiled for the baseline of its architecture; the loops below a kernel are compiled again for
// AVX2 and AVX-512 by a function attribute, and dispatch.h chooses among them at run time. AVX-512
// is worth its code though the kernels wait for memory: whole-line stores brought 40 ms to 30 ms on
// 150 x 600k fp32. The baseline of 64-bit Arm has vectors and fused operations: it is all there is.
//
// A target attribute does not reach callees: what must be vectorised for it has to be inlined into
// the function that carries it (FASTAMP_ALWAYS_INLINE, FASTAMP_HOST_DEVICE) or carry it too. FMA
// contraction is off for these files: a fused multiply-add would give other bits than torch and the
// baseline. Where torch's own kernels fuse, the functors say so, and the targets have the
// instruction.

#define FASTAMP_ALWAYS_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTAMP_X86_TARGETS 1
#define FASTAMP_TARGET_AVX2 __attribute__((target("avx2,f16c,fma")))
#define FASTAMP_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma")))
#endif

#include <cstdint>

namespace fastamp::kernels::cpu {

enum class Target : std::uint8_t { kBaseline, kAvx2, kAvx512 };

/// The best target that this processor and operating system run. Thread-safe.
inline Target best_target() {
#ifdef FASTAMP_X86_TARGETS
  static const Target best = [] {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c") ||
        !__builtin_cpu_supports("fma")) {
      return Target::kBaseline;
    }
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Target::kAvx512 : Target::kAvx2;
  }();
  return best;
#else
  return Target::kBaseline;
#endif
}

}  // namespace fastamp::kernels::cpu
