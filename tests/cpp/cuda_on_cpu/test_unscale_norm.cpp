// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::unscale_and_check_ with norm and counts, which has a kernel of its own.

#include "cuda_on_cpu/norm_case.h"
#include "support/catch.h"

#include <ATen/ops/full.h>

#include <cmath>

using namespace fastamp::test;

TEST_CASE("emulated unscale with norm: every dtype, size and alignment", "[unscale_norm]") {
  const auto dtype =
      GENERATE(Dtypes::kFloat, Dtypes::kHalf, Dtypes::kBFloat16, Dtypes::kDouble, Dtypes::kMixed);
  for (std::size_t skew = 0; skew < (brief() ? 2 : 4); ++skew) {
    std::vector<double> sums;
    for_each_shape([&] {
      Values values(static_cast<unsigned>(skew));
      const auto grads = edge_tensors(values, dtype, skew);
      sums.push_back(check_norm_case(grads, skew == 2 ? 1.0F : 0.25F, true));
    });
    for (const double sum : sums) {
      CHECK(sum == sums.front());
    }
  }
}

TEST_CASE("emulated unscale with norm: counts of inf and NaN", "[unscale_norm]") {
  const auto dtype = GENERATE(Dtypes::kFloat, Dtypes::kHalf, Dtypes::kBFloat16, Dtypes::kDouble);
  for_each_shape([&] {
    for (const float inv_scale : {1.0F, 0.5F}) {
      Values values(1);
      const auto grads = edge_tensors(values, dtype, 1);
      set_element(grads[0], 0, NAN);
      set_element(grads[9], 2, INFINITY);
      set_element(grads[29], 8999, -INFINITY);
      set_element(grads[29], 0, NAN);
      set_element(grads[29], 4095, NAN);
      check_norm_case(grads, inv_scale, true);
    }
  });
}

TEST_CASE("emulated unscale with norm: a product that overflows", "[unscale_norm]") {
  for_each_shape([] {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const float factor = dtype == at::kHalf ? 1e3F : 1e36F;
      for (const float value : {60.0F, 340.0F, 341.0F}) {  // 65504 / 1e3; 3.4e38 / 1e36 is 340.3
        const std::vector<at::Tensor> grads = {at::full({700}, 20.0F, dtype),
                                               at::full({5000}, 1.0F, dtype)};
        set_element(grads[1], 4998, value);
        // As it is stored: bfloat16 ends at 3.39e38.
        const auto product = at::full({}, element_of(grads[1], 4998) * factor).to(dtype);
        const bool overflows = !product.isfinite().item<bool>();
        check_overflow_case(grads, factor, true, overflows);
      }
    }
    Values values(1);
    check_overflow_case(edge_tensors(values, Dtypes::kMixed, 1), INFINITY, true, true);
    check_overflow_case(edge_tensors(values, Dtypes::kMixed, 1), NAN, true, true);
  });
}

TEST_CASE("emulated unscale with norm: a raised flag stays, and one without a value gets one",
          "[unscale_norm]") {
  for_each_shape([&] {
    Values values(1);
    const auto grads = edge_tensors(values, Dtypes::kMixed, 1);
    check_norm_case(grads, 0.5F, true, 1.0F);
    check_norm_case(grads, 0.5F, true, NAN);
    set_element(grads[9], 2, INFINITY);
    check_norm_case(grads, 0.5F, true, 7.0F);
    check_norm_case(edge_tensors(values, Dtypes::kMixed, 1), 0.5F, true, 7.0F);
  });
}
