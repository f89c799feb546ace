// SPDX-License-Identifier: Apache-2.0
#include "autocast/make/float8_product.h"

#include "core/build_config.h"

#if FASTAMP_HAVE_SCALED_MM
#include <ATen/ops/_scaled_mm_ops.h>
#else
#include <c10/util/Exception.h>
#endif

namespace fastamp::autocast {

#if FASTAMP_HAVE_SCALED_MM
at::Tensor float8_product(Float8Matrix a, Float8Matrix b, const std::optional<at::Tensor>& bias,
                          c10::ScalarType out, bool fast_accumulate) {
  return at::_ops::_scaled_mm::call(a.data, b.data.t(), a.inverse_scale, b.inverse_scale, bias,
                                    /*scale_result=*/std::nullopt, out, fast_accumulate);
}
#else
at::Tensor float8_product(Float8Matrix /*a*/, Float8Matrix /*b*/,
                          const std::optional<at::Tensor>& /*bias*/, c10::ScalarType /*out*/,
                          bool /*fast_accumulate*/) {
  TORCH_INTERNAL_ASSERT(false, "no region has a recipe where torch has no _scaled_mm");
}
#endif

}  // namespace fastamp::autocast
