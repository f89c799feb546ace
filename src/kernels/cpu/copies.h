#pragma once

// One body, a copy per instruction set, and the choice between them.
//
// A body is a struct with
//   template <typename Convert> static FASTAMP_HOST_DEVICE R run(A...);
// whose Convert is one of convert.h. Everything below run() has to be inlined into it (isa.h).

#include "kernels/cpu/convert.h"
#include "kernels/cpu/isa.h"

namespace fastamp::kernels::cpu {

template <typename Body, typename Signature>
struct Copies;

template <typename Body, typename R, typename... A>
struct Copies<Body, R(A...)> {
  static R baseline(A... args) { return Body::template run<BaselineConvert>(args...); }
#ifdef FASTAMP_X86_TARGETS
  FASTAMP_TARGET_AVX2 static R avx2(A... args) { return Body::template run<Avx2Convert>(args...); }
  FASTAMP_TARGET_AVX512 static R avx512(A... args) {
    return Body::template run<Avx2Convert>(args...);
  }
#endif
};

/// The copy of Body::run for this processor.
template <typename Body, typename Signature>
Signature* best_copy() {
  switch (best_isa()) {
#ifdef FASTAMP_X86_TARGETS
    case Isa::kAvx512:
      return Copies<Body, Signature>::avx512;
    case Isa::kAvx2:
      return Copies<Body, Signature>::avx2;
#endif
    default:
      return Copies<Body, Signature>::baseline;
  }
}

}  // namespace fastamp::kernels::cpu
