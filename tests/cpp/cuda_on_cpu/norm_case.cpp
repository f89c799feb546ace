// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/norm_case.h"

#include "kernels/amp_args.h"
#include "support/catch.h"

#include <ATen/ops/full.h>

#include <cmath>

namespace fastamp::test {

NormOutputs::NormOutputs(std::size_t grads)
    : sum(at::full({}, -1.0, at::kDouble)),
      // Written by a call that finds an overflow, and as a whole; else they stay.
      counts(at::full({static_cast<std::int64_t>(grads), 2}, 7, at::kLong)),
      coefficient(scalar(-1.0F)),
      norm(scalar(-1.0F)),
      flag(scalar(0.0F)) {}

double check_norm_case(const std::vector<at::Tensor>& grads, float inv_scale, bool writes,
                       float flag) {
  const auto expected = copies_of(grads);
  const double exact = exact_sum(grads, inv_scale);
  const auto factor = scalar(inv_scale);
  const NormOutputs on_cuda(grads.size());
  const NormOutputs on_cpu(grads.size());
  const bool overwrite = flag != 0.0F && flag != 1.0F;
  on_cuda.flag.fill_(flag);
  on_cpu.flag.fill_(flag);
  if (writes) {
    kernels::unscale_and_check_cuda(
        {grads, factor, on_cuda.flag, on_cuda.sum, on_cuda.counts, overwrite});
    kernels::unscale_and_check_cpu(
        {expected, factor, on_cpu.flag, on_cpu.sum, on_cpu.counts, overwrite});
  } else {
    kernels::norm_and_check_cuda({grads, factor, on_cuda.flag, *on_cuda.sum, on_cuda.counts, 2.0,
                                  on_cuda.coefficient, on_cuda.norm, overwrite});
    kernels::norm_and_check_cpu({expected, factor, on_cpu.flag, *on_cpu.sum, on_cpu.counts, 2.0,
                                 on_cpu.coefficient, on_cpu.norm, overwrite});
  }
  CHECK(same_bits(grads, expected));
  const bool finite = std::isfinite(*on_cpu.sum->const_data_ptr<double>());
  CHECK(value_of(on_cuda.flag) == (finite && flag != 1.0F ? 0.0F : 1.0F));
  CHECK(value_of(on_cuda.flag) == value_of(on_cpu.flag));
  CHECK(same_bits(*on_cuda.counts, *on_cpu.counts));
  if (!finite) {
    CHECK(!std::isfinite(on_cuda.sum_value()));
    return on_cuda.sum_value();
  }
  CHECK(on_cuda.sum_value() == Approx(exact).epsilon(1e-13));
  CHECK(value_of(*on_cuda.norm) == Approx(value_of(*on_cpu.norm)).epsilon(1e-6));
  CHECK(value_of(*on_cuda.coefficient) == Approx(value_of(*on_cpu.coefficient)).epsilon(1e-6));
  return on_cuda.sum_value();
}

void check_overflow_case(const std::vector<at::Tensor>& grads, float inv_scale, bool writes,
                         bool expected, double max_norm) {
  const auto copies = copies_of(grads);
  const auto factor = scalar(inv_scale);
  const NormOutputs on_cuda(grads.size());
  const NormOutputs on_cpu(grads.size());
  if (writes) {
    kernels::unscale_and_check_cuda({grads, factor, on_cuda.flag, on_cuda.sum, on_cuda.counts});
    kernels::unscale_and_check_cpu({copies, factor, on_cpu.flag, on_cpu.sum, on_cpu.counts});
  } else {
    kernels::norm_and_check_cuda({grads, factor, on_cuda.flag, *on_cuda.sum, on_cuda.counts,
                                  max_norm, on_cuda.coefficient, on_cuda.norm});
    kernels::norm_and_check_cpu({copies, factor, on_cpu.flag, *on_cpu.sum, on_cpu.counts, max_norm,
                                 on_cpu.coefficient, on_cpu.norm});
  }
  CHECK(same_bits(grads, copies));
  CHECK(value_of(on_cuda.flag) == (expected ? 1.0F : 0.0F));
  CHECK(value_of(on_cpu.flag) == (expected ? 1.0F : 0.0F));
  CHECK(same_bits(*on_cuda.counts, *on_cpu.counts));
}

double exact_sum(const std::vector<at::Tensor>& grads, float inv_scale) {
  long double sum = 0;
  for (const auto& grad : grads) {
    const auto wide = grad.to(at::kDouble);
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      const long double x = wide.const_data_ptr<double>()[i];
      sum += x * x;
    }
  }
  return static_cast<double>(sum * inv_scale * inv_scale);
}

}  // namespace fastamp::test
