#pragma once

// Instruction sets of the CPU kernels. The library is compiled for the baseline of its
// architecture; the loops below a kernel are compiled again for AVX2 and AVX-512 by a function
// attribute, and the copy to run is chosen once per process. AVX-512 is worth its copy though the
// kernels wait for memory: whole-line stores brought 40 ms to 30 ms on 150 x 600k fp32.
//
// A target attribute does not reach callees: what must be vectorised for it has to be inlined into
// the function that carries it (FASTAMP_HOST_DEVICE does that) or carry it too. FMA contraction is
// off for these files: a fused multiply-add would give other bits than torch and the baseline.
// Where torch's own kernels fuse, the functors say so, and the targets have the instruction.

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTAMP_X86_TARGETS 1
#define FASTAMP_TARGET_AVX2 __attribute__((target("avx2,f16c,fma")))
#define FASTAMP_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma")))
#endif

#include <cstdint>

namespace fastamp::kernels::cpu {

enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

/// The best of Isa that this processor and operating system run. Thread-safe.
inline Isa best_isa() {
#ifdef FASTAMP_X86_TARGETS
  static const Isa best = [] {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c") ||
        !__builtin_cpu_supports("fma")) {
      return Isa::kBaseline;
    }
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::kAvx512 : Isa::kAvx2;
  }();
  return best;
#else
  return Isa::kBaseline;
#endif
}

}  // namespace fastamp::kernels::cpu
