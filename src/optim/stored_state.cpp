// SPDX-License-Identifier: Apache-2.0
// The arithmetic of kernels/functors/remainder.h once more, in torch's operators: checkpoints are
// converted on any device, once, and a kernel for it would be one more to launch, test and ship.
// tests/cpp/optim/test_remainders.cpp holds the two together, bit for bit.

#include "core/dtypes.h"

#include <fastamp/optim/stored_state.h>

#include <ATen/ATen.h>  // wide include: ten operators
#include <c10/util/Exception.h>

namespace fastamp::optim {
namespace {

void check_pair(const char* function, const at::Tensor& param, const at::Tensor& other,
                const char* name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(param.defined() && other.defined(), function,
                    ": expected two tensors, got an undefined one");
  TORCH_CHECK_TYPE(is_16_bit(param), function, ": expected param to be Half or BFloat16, got ",
                   param.scalar_type());
  TORCH_CHECK_TYPE(other.scalar_type() == dtype, function, ": expected ", name, " to be ", dtype,
                   ", got ", other.scalar_type());
  TORCH_CHECK_VALUE(other.sizes() == param.sizes(), function, ": expected ", name, " of shape ",
                    param.sizes(), ", that of param, got ", other.sizes());
  TORCH_CHECK_VALUE(other.device() == param.device(), function, ": expected ", name, " on ",
                    param.device(), ", the device of param, got ", other.device());
}

at::Tensor bits_of(const at::Tensor& values) { return values.view(at::kInt); }

/// 2^(bias - exponent) or its inverse, of float16 values: what one unit of a remainder is worth.
at::Tensor power_of_exponent(const at::Tensor& wide, std::int64_t sign, std::int64_t bias) {
  constexpr std::int64_t kExponentUnit = 8388608;  // 2^23
  const auto exponents =
      bits_of(wide).bitwise_and(0x7fffffff).div(kExponentUnit, "floor").clamp(113);
  return exponents.mul(sign).add(bias).mul(kExponentUnit).to(at::kInt).view(at::kFloat);
}

}  // namespace

at::Tensor current_master(const at::Tensor& param, const at::Tensor& master) {
  TORCH_CHECK_VALUE(param.defined() && master.defined(),
                    "current_master: expected two tensors, got an undefined one");
  TORCH_CHECK_VALUE(master.sizes() == param.sizes(), "current_master: expected master of shape ",
                    param.sizes(), ", that of param, got ", master.sizes());
  const auto written = param.detach();
  const auto rounded = master.detach().to(written.scalar_type());
  return at::where(rounded.eq(written), master.detach(), written.to(at::kFloat));
}

at::Tensor master_from_remainder(const at::Tensor& param, const at::Tensor& remainder) {
  check_pair("master_from_remainder", param, remainder, "remainder", at::kShort);
  const auto wide = param.detach().to(at::kFloat);
  const auto finite = wide.isfinite();
  if (param.scalar_type() == at::kHalf) {
    const auto part = remainder.to(at::kFloat).mul(power_of_exponent(wide, 1, -26));
    return at::where(finite.logical_and(remainder.ne(0)), wide + part, wide);
  }
  const auto counts = finite.logical_and(wide.ne(0).logical_or(remainder.gt(0)));
  const auto added = at::where(counts, remainder, at::zeros_like(remainder)).to(at::kInt);
  return bits_of(wide).add(added).view(at::kFloat);
}

at::Tensor remainder_from_master(const at::Tensor& param, const at::Tensor& master) {
  check_pair("remainder_from_master", param, master, "master", at::kFloat);
  const auto wide = param.detach().to(at::kFloat);
  const auto exact = master.detach();
  const auto has_remainder =
      wide.isfinite().logical_and(exact.to(param.scalar_type()).eq(param.detach()));
  at::Tensor remainder;
  if (param.scalar_type() == at::kHalf) {
    const auto count = (exact - wide).mul(power_of_exponent(wide, -1, 280));
    remainder = count.round().clamp(-32767, 32767);
  } else {
    remainder = bits_of(exact).sub(bits_of(wide)).clamp(-32768, 32767);
  }
  // The cast of what has no remainder, possibly NaN, must not be read.
  return at::where(has_remainder, remainder, at::zeros_like(remainder)).to(at::kShort);
}

}  // namespace fastamp::optim
