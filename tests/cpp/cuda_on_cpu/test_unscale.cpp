// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::unscale_and_check_ without norm and counts has the CPU kernel's bits.

#include "cuda_on_cpu/tensors.h"
#include "kernels/amp_args.h"
#include "support/catch.h"

#include <limits>
#include <optional>

using namespace fastamp::test;
using fastamp::kernels::unscale_and_check_cpu;
using fastamp::kernels::unscale_and_check_cuda;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const std::optional<at::Tensor> kNone;

void check_unscale(const std::vector<at::Tensor>& grads, float inv_scale) {
  const auto expected = copies_of(grads);
  const auto factor = scalar(inv_scale);
  const auto flag = scalar(0.0F);
  const auto expected_flag = scalar(0.0F);
  unscale_and_check_cuda({grads, factor, flag, kNone, kNone});
  unscale_and_check_cpu({expected, factor, expected_flag, kNone, kNone});
  CHECK(same_bits(grads, expected));
  CHECK(value_of(flag) == value_of(expected_flag));
}

}  // namespace

TEST_CASE("emulated unscale: every dtype, size and alignment", "[unscale]") {
  const auto dtype =
      GENERATE(Dtypes::kFloat, Dtypes::kHalf, Dtypes::kBFloat16, Dtypes::kDouble, Dtypes::kMixed);
  for_each_shape([&] {
    for (std::size_t skew = 0; skew < (brief() ? 2 : 4); ++skew) {
      Values values(static_cast<unsigned>(skew));
      const auto grads = edge_tensors(values, dtype, skew);
      check_unscale(grads, 0.37F);
      check_unscale(grads, 1.0F);
    }
  });
}

TEST_CASE("emulated unscale: one inf or NaN anywhere raises the flag", "[unscale]") {
  const auto bad = GENERATE(kInfinity, -kInfinity, kNan);
  const auto dtype = GENERATE(Dtypes::kFloat, Dtypes::kHalf, Dtypes::kBFloat16, Dtypes::kDouble);
  for_each_shape([&] {
    Values values(1);
    for (const std::size_t which : {1U, 9U, 24U, 29U}) {
      auto grads = edge_tensors(values, dtype, brief() ? which : 1);
      const auto last = grads[which].numel() - 1;
      for (const std::int64_t at : {std::int64_t{0}, last / 2, last}) {
        auto broken = grads;
        broken[which] = copy_of(grads[which]);
        set_element(broken[which], at, bad);
        check_unscale(broken, at == 0 ? 1.0F : 0.5F);
        if (brief()) {
          return;
        }
      }
    }
  });
}

TEST_CASE("emulated unscale: a product that overflows raises the flag", "[unscale]") {
  const auto dtype = GENERATE(Dtypes::kFloat, Dtypes::kHalf, Dtypes::kBFloat16);
  const float factor = dtype == Dtypes::kHalf ? 3e3F : 3e36F;
  for_each_shape([&] {
    for (const float value : {21.0F, 23.0F, 110.0F, 120.0F}) {  // 65504 and 3.4e38 in between
      Values values(1);
      const auto grads = edge_tensors(values, dtype, 1);
      set_element(grads[29], grads[29].numel() / 2, value);
      check_unscale(grads, factor);
      if (brief()) {
        return;
      }
    }
    Values values(1);
    check_unscale(edge_tensors(values, Dtypes::kMixed, 1), kInfinity);
    check_unscale(edge_tensors(values, Dtypes::kMixed, 1), kNan);
  });
}

TEST_CASE("emulated unscale: blocks that all find an overflow raise one flag", "[unscale]") {
  for_each_shape([] {
    Values values(4);
    const std::vector<at::Tensor> grads = {values.tensor(4096, at::kFloat)};
    for (std::int64_t i = 0; i < grads[0].numel(); i += 64) {
      set_element(grads[0], i, kInfinity);
    }
    check_unscale(grads, 0.5F);
  });
}

TEST_CASE("emulated unscale: strided gradients and an empty list", "[unscale]") {
  for_each_shape([] {
    Values values(2);
    // A view of every other column has no dense memory; a transposed one has.
    const auto base = values.tensor(60, at::kFloat).view({6, 10});
    const auto other = values.tensor(48, at::kHalf).view({6, 8});
    const auto expected = copy_of(base.view(-1)).view({6, 10});
    const auto expected_other = copy_of(other.view(-1)).view({6, 8});
    const auto factor = scalar(0.25F);
    const auto flag = scalar(0.0F);
    const auto strided = [](const at::Tensor& t) { return t.slice(1, 0, 10, 2); };
    unscale_and_check_cuda({{strided(base), other.t()}, factor, flag, kNone, kNone});
    unscale_and_check_cpu({{strided(expected), expected_other.t()}, factor, flag, kNone, kNone});
    CHECK(same_bits(base, expected));
    CHECK(same_bits(other, expected_other));
    unscale_and_check_cuda({{}, factor, flag, kNone, kNone});
    CHECK(value_of(flag) == 0.0F);
  });
}

TEST_CASE("emulated unscale: a raised flag stays raised", "[unscale]") {
  Values values(3);
  const std::vector<at::Tensor> grads = {values.tensor(100, at::kFloat)};
  const auto factor = scalar(0.5F);
  const auto flag = scalar(1.0F);
  unscale_and_check_cuda({grads, factor, flag, kNone, kNone});
  CHECK(value_of(flag) == 1.0F);
}

TEST_CASE("emulated unscale: a flag without a value gets one", "[unscale]") {
  Values values(3);
  const std::vector<at::Tensor> grads = {values.tensor(100, at::kFloat)};
  const auto expected = copies_of(grads);
  const auto factor = scalar(0.5F);
  const auto flag = scalar(kNan);
  unscale_and_check_cuda({grads, factor, flag, kNone, kNone, true});
  CHECK(value_of(flag) == 0.0F);
  set_element(grads[0], 99, kInfinity);
  unscale_and_check_cuda({grads, factor, flag, kNone, kNone, true});
  CHECK(value_of(flag) == 1.0F);
  unscale_and_check_cuda({{}, factor, flag, kNone, kNone, true});
  CHECK(value_of(flag) == 0.0F);
  unscale_and_check_cpu({expected, factor, scalar(0.0F), kNone, kNone});
  unscale_and_check_cpu({expected, factor, scalar(0.0F), kNone, kNone});
  set_element(expected[0], 99, kInfinity);
  CHECK(same_bits(grads, expected));
}
