// SPDX-License-Identifier: Apache-2.0
// Emulated: fastamp::norm_and_check_. Sums are exact to the last bits and the same for every launch
// shape; counts and flag are the CPU kernel's; gradients are only read.

#include "cuda_on_cpu/norm_case.h"
#include "kernels/amp_args.h"
#include "support/catch.h"

#include <ATen/ops/full.h>

#include <cmath>

using namespace fastamp::test;
using fastamp::kernels::norm_and_check_cuda;

namespace {

/// Gradients of all dtypes that the op takes.
std::vector<at::Tensor> gradients(std::size_t skew) {
  Values values(static_cast<unsigned>(skew));
  std::vector<at::Tensor> grads;
  constexpr std::array<at::ScalarType, 3> kTypes = {at::kFloat, at::kHalf, at::kBFloat16};
  for (std::size_t i = 0; i < edge_sizes().size(); ++i) {
    grads.push_back(values.tensor(edge_sizes()[i], kTypes[(i + skew) % 3], i * skew % 9, 100.0F));
  }
  return grads;
}

}  // namespace

TEST_CASE("emulated norm: the same bits for every launch shape", "[norm]") {
  for (std::size_t skew = 0; skew < (brief() ? 2 : 4); ++skew) {
    const auto grads = gradients(skew);
    std::vector<double> sums;
    for_each_shape(
        [&] { sums.push_back(check_norm_case(grads, skew == 2 ? 1.0F : 0.25F, false)); });
    for (const double sum : sums) {
      CHECK(sum == sums.front());
    }
  }
}

TEST_CASE("emulated norm: counts of inf and NaN per gradient", "[norm]") {
  const auto grads = gradients(1);
  set_element(grads[9], 2, INFINITY);
  set_element(grads[9], 3, NAN);
  set_element(grads[29], 8999, -INFINITY);
  set_element(grads[29], 2048, NAN);
  set_element(grads[29], 2049, NAN);
  for_each_shape([&] {
    check_norm_case(grads, 0.25F, false);
    check_norm_case(gradients(1), 0.25F, false);  // the zeros of the workspace are back
    check_norm_case(grads, 0.25F, false);
  });
}

TEST_CASE("emulated norm: a raised flag stays, and one without a value gets one", "[norm]") {
  const auto bad = gradients(1);
  set_element(bad[9], 2, INFINITY);
  for_each_shape([&] {
    check_norm_case(gradients(1), 0.25F, false, 1.0F);
    check_norm_case(gradients(1), 0.25F, false, NAN);
    check_norm_case(bad, 0.25F, false, 7.0F);
    check_norm_case(gradients(1), 0.25F, false, 7.0F);  // the zeros of the workspace are back
  });
  const std::optional<at::Tensor> none;
  const auto sum = at::full({}, -1.0, at::kDouble);
  const auto flag = scalar(7.0F);
  const auto one = scalar(1.0F);
  norm_and_check_cuda({bad, one, flag, sum, none, std::nullopt, none, none, true});
  CHECK(value_of(flag) == 1.0F);
  norm_and_check_cuda({{}, one, flag, sum, none, std::nullopt, none, none, true});
  CHECK(value_of(flag) == 0.0F);
}

TEST_CASE("emulated norm: a product that overflows, and a norm that does not fit fp32", "[norm]") {
  for_each_shape([] {
    // 512 elements of 2e37 have a norm of 4.5e38.
    const std::vector<at::Tensor> grads = {at::full({512}, 2e7F), at::full({5000}, 1.0F)};
    check_overflow_case(grads, 1e30F, false, false);
    set_element(grads[1], 4999, 3.5e8F);
    check_overflow_case(grads, 1e30F, false, true);
    check_overflow_case(grads, 1.0F, false, false);  // the zeros of the workspace are back
    check_overflow_case(grads, INFINITY, false, true);
    check_overflow_case(grads, NAN, false, true);
    check_overflow_case({at::full({512}, 2e37F)}, 1.0F, false, true, INFINITY);  // NaN as factor
    check_overflow_case(grads, 1.0F, false, true, NAN);
    // A step takes products of fp16 gradients in fp32.
    check_overflow_case({at::full({300}, 6e4F, at::kHalf)}, 8.0F, false, false);
  });
}

TEST_CASE("emulated norm: an empty list, empty gradients, no counts", "[norm]") {
  const std::optional<at::Tensor> none;
  const auto sum = at::full({}, -1.0, at::kDouble);
  const auto flag = scalar(0.0F);
  const auto one = scalar(1.0F);
  norm_and_check_cuda({{}, one, flag, sum, none, std::nullopt, none, none});
  CHECK(*sum.const_data_ptr<double>() == 0.0);
  norm_and_check_cuda({{guarded(0, at::kHalf)}, one, flag, sum, none, std::nullopt, none, none});
  CHECK(*sum.const_data_ptr<double>() == 0.0);
  Values values(5);
  const std::vector<at::Tensor> grads = {values.tensor(5000, at::kFloat, 1)};
  norm_and_check_cuda({grads, one, flag, sum, none, std::nullopt, none, none});
  CHECK(*sum.const_data_ptr<double>() == Approx(exact_sum(grads, 1.0F)).epsilon(1e-13));
  set_element(grads[0], 4999, NAN);
  norm_and_check_cuda({grads, one, flag, sum, none, std::nullopt, none, none});
  CHECK(value_of(flag) == 1.0F);
}

TEST_CASE("emulated norm: more runs than threads of the last block", "[norm]") {
  if (brief()) {
    return;
  }
  for_each_shape([] {
    Values values(6);
    std::vector<at::Tensor> grads;
    for (std::size_t i = 0; i < 700; ++i) {
      const auto numel = static_cast<std::int64_t>(1 + i % 40);
      grads.push_back(values.tensor(numel, i % 2 == 0 ? at::kFloat : at::kBFloat16, i % 3));
    }
    check_norm_case(grads, 0.5F, false);
  });
}
