#pragma once

#include "kernels/functors/host_device.h"

#include <cstdint>
#include <cstring>

namespace fastamp::kernels {

/// True for inf and NaN: all exponent bits are set. Bits, because isfinite() may be folded to
/// `true` by a program built with -ffast-math.
FASTAMP_HOST_DEVICE bool is_non_finite(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7f800000U) == 0x7f800000U;
}

FASTAMP_HOST_DEVICE bool is_non_finite(double value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7ff0000000000000U) == 0x7ff0000000000000U;
}

/// One gradient element, in the type the arithmetic runs in: float for fp16, bf16 and fp32
/// gradients (rounded to nearest even when stored), double for fp64.
template <typename opmath_t>
struct Unscale {
  opmath_t inv_scale;  ///< 1 / loss scale; always comes from an fp32 tensor.

  /// With an inverse scale of 1 the stored bits would not change, so callers skip the store.
  FASTAMP_HOST_DEVICE bool rewrites() const { return inv_scale != opmath_t{1}; }

  FASTAMP_HOST_DEVICE opmath_t operator()(opmath_t grad) const { return grad * inv_scale; }
};

}  // namespace fastamp::kernels
