#pragma once

// Instruction sets of the CPU kernels. The library is compiled for the baseline of its
// architecture; the loops below a kernel are compiled once more for AVX2 + F16C by a function
// attribute, and the copy to run is chosen once per process. AVX-512 is left out on purpose: these
// kernels wait for memory from the second cache level on, and it measured no faster.
//
// A target attribute does not reach callees: what must be vectorised for AVX2 has to be inlined
// into a FASTAMP_TARGET_AVX2 function (FASTAMP_HOST_DEVICE does that) or carry the attribute.
// FMA is not enabled: a fused multiply-add would give other bits than torch and the baseline.

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTAMP_HAVE_AVX2 1
#define FASTAMP_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace fastamp::kernels::cpu {

/// Whether this processor and operating system run FASTAMP_TARGET_AVX2 code. Thread-safe.
inline bool runs_avx2() {
#ifdef FASTAMP_HAVE_AVX2
  static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return yes;
#else
  return false;
#endif
}

}  // namespace fastamp::kernels::cpu
