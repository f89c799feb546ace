// SPDX-License-Identifier: Apache-2.0
// CPU kernel of small casts.
//
// Layout: dense arrays, whatever the order of their dimensions. Mapping: one thread; a cast worth
// several is left to torch's copy kernel. Traffic per element: 4 bytes read and 2 written, or the
// reverse. Numerics: round to nearest even; a NaN becomes the canonical one, as c10 converts.

#include "kernels/cpu/dense_cast.h"

#include "core/dtypes.h"
#include "kernels/cpu/dispatch.h"

namespace fastamp::kernels::cpu {
namespace {

using c10::ScalarType;

struct CastBody {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE void run(const void* in, ScalarType from, void* out, ScalarType to,
                                        std::int64_t n) {
    if (to == c10::kBFloat16) {
      Convert::narrow(static_cast<const float*>(in), static_cast<c10::BFloat16*>(out), n);
    } else if (to == c10::kHalf) {
      Convert::narrow(static_cast<const float*>(in), static_cast<c10::Half*>(out), n);
    } else if (from == c10::kBFloat16) {
      Convert::widen(static_cast<const c10::BFloat16*>(in), static_cast<float*>(out), n);
    } else {
      Convert::widen(static_cast<const c10::Half*>(in), static_cast<float*>(out), n);
    }
  }
};

using CastFn = void(const void*, ScalarType, void*, ScalarType, std::int64_t);

}  // namespace

bool can_cast(ScalarType from, ScalarType to) {
  return (from == c10::kFloat && is_16_bit(to)) || (is_16_bit(from) && to == c10::kFloat);
}

void cast_contiguous(const void* in, ScalarType from, void* out, ScalarType to, std::int64_t n) {
  static auto* const cast = select_target<CastBody, CastFn>();
  cast(in, from, out, to, n);
}

}  // namespace fastamp::kernels::cpu
