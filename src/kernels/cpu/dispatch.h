// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dynamic dispatch: one body, compiled for each target, and the choice among them once per process.
//
// A body is a struct with
//   template <typename Convert> static FASTAMP_ALWAYS_INLINE R run(A...);
// whose Convert is one of conversions.h. Everything below run() has to be inlined into it
// (targets.h).

#include "kernels/cpu/conversions.h"
#include "kernels/cpu/targets.h"

namespace fastamp::kernels::cpu {

template <typename Body, typename Signature>
struct Targets;

template <typename Body, typename R, typename... A>
struct Targets<Body, R(A...)> {
  static R baseline(A... args) { return Body::template run<BaselineConvert>(args...); }
#ifdef FASTAMP_X86_TARGETS
  FASTAMP_TARGET_AVX2 static R avx2(A... args) { return Body::template run<Avx2Convert>(args...); }
  FASTAMP_TARGET_AVX512 static R avx512(A... args) {
    return Body::template run<Avx2Convert>(args...);
  }
#endif
};

/// Body::run for the best target of this processor.
template <typename Body, typename Signature>
Signature* select_target() {
  switch (best_target()) {
#ifdef FASTAMP_X86_TARGETS
    case Target::kAvx512:
      return Targets<Body, Signature>::avx512;
    case Target::kAvx2:
      return Targets<Body, Signature>::avx2;
#endif
    default:
      return Targets<Body, Signature>::baseline;
  }
}

}  // namespace fastamp::kernels::cpu
