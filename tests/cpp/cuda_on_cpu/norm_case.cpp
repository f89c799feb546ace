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
  const NormOutputs ours(grads.size());
  const NormOutputs theirs(grads.size());
  const bool overwrite = flag != 0.0F && flag != 1.0F;
  ours.flag.fill_(flag);
  theirs.flag.fill_(flag);
  if (writes) {
    kernels::unscale_and_check_cuda({grads, factor, ours.flag, ours.sum, ours.counts, overwrite});
    kernels::unscale_and_check_cpu(
        {expected, factor, theirs.flag, theirs.sum, theirs.counts, overwrite});
  } else {
    kernels::norm_and_check_cuda({grads, factor, ours.flag, *ours.sum, ours.counts, 2.0,
                                  ours.coefficient, ours.norm, overwrite});
    kernels::norm_and_check_cpu({expected, factor, theirs.flag, *theirs.sum, theirs.counts, 2.0,
                                 theirs.coefficient, theirs.norm, overwrite});
  }
  CHECK(same_bits(grads, expected));
  const bool finite = std::isfinite(*theirs.sum->const_data_ptr<double>());
  CHECK(value_of(ours.flag) == (finite && flag != 1.0F ? 0.0F : 1.0F));
  CHECK(value_of(ours.flag) == value_of(theirs.flag));
  CHECK(same_bits(*ours.counts, *theirs.counts));
  if (!finite) {
    CHECK(!std::isfinite(ours.sum_value()));
    return ours.sum_value();
  }
  CHECK(ours.sum_value() == Approx(exact).epsilon(1e-13));
  CHECK(value_of(*ours.norm) == Approx(value_of(*theirs.norm)).epsilon(1e-6));
  CHECK(value_of(*ours.coefficient) == Approx(value_of(*theirs.coefficient)).epsilon(1e-6));
  return ours.sum_value();
}

void check_overflow_case(const std::vector<at::Tensor>& grads, float inv_scale, bool writes,
                         bool expected, double max_norm) {
  const auto copies = copies_of(grads);
  const auto factor = scalar(inv_scale);
  const NormOutputs ours(grads.size());
  const NormOutputs theirs(grads.size());
  if (writes) {
    kernels::unscale_and_check_cuda({grads, factor, ours.flag, ours.sum, ours.counts});
    kernels::unscale_and_check_cpu({copies, factor, theirs.flag, theirs.sum, theirs.counts});
  } else {
    kernels::norm_and_check_cuda(
        {grads, factor, ours.flag, *ours.sum, ours.counts, max_norm, ours.coefficient, ours.norm});
    kernels::norm_and_check_cpu({copies, factor, theirs.flag, *theirs.sum, theirs.counts, max_norm,
                                 theirs.coefficient, theirs.norm});
  }
  CHECK(same_bits(grads, copies));
  CHECK(value_of(ours.flag) == (expected ? 1.0F : 0.0F));
  CHECK(value_of(theirs.flag) == (expected ? 1.0F : 0.0F));
  CHECK(same_bits(*ours.counts, *theirs.counts));
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
