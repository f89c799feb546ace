// SPDX-License-Identifier: Apache-2.0
// Sum of squares and unscaling of many small fp32 arrays in one loop.
//
// Traffic per element: one read and, unless the factor is 1, one write. Numerics and order of the
// sums: kernels/functors/norm.h, kernels/cpu/squares.h.

#include "kernels/cpu/small_arrays.h"

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/squares.h"
#include "kernels/functors/norm.h"
#include "kernels/functors/unscale.h"

#include <cstdint>

namespace fastamp::kernels::cpu {
namespace {

struct SmallArrays {
  template <typename Convert>
  static FASTAMP_ALWAYS_INLINE std::size_t run(KnownArrays arrays, std::size_t first, float factor,
                                               double bound, double& total) {
    const Unscale<float> unscale{factor};
    const bool rewrites = unscale.rewrites();
    double sums = total;
    auto i = first;
    for (; i < arrays.size(); ++i) {
      const HostArray& array = arrays[i];
      if (array.dtype != c10::kFloat || array.numel >= kNormChunkNumel || array.data == nullptr) {
        break;
      }
      prefetch_after(arrays, i);
      auto* const data = static_cast<float*>(array.data);
      const double sum = sum_squares<Convert>(data, array.numel);
      if (!is_safe(sum, bound)) [[unlikely]] {
        break;
      }
      sums += sum;
      if (rewrites) {
        for (std::int64_t k = 0; k < array.numel; ++k) {
          data[k] = unscale(data[k]);
        }
      }
    }
    total = sums;
    return i;
  }
};

}  // namespace

SmallArraysFn* small_arrays_function() {
  static auto* const best = select_target<SmallArrays, SmallArraysFn>();
  return best;
}

}  // namespace fastamp::kernels::cpu
