// SPDX-License-Identifier: Apache-2.0
#include "core/dtypes.h"
#include "kernels/functors/exponents.h"

#include <fastamp/ops/exponents.h>
#include <fastamp/ops/number_range.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace fastamp {
namespace {

constexpr int64_t kBias = 127;

/// The exponents of a dtype: of its smallest normal number, of half its smallest subnormal one
/// (from there on a number rounds to 0), and its greatest number.
struct DtypeRange {
  int64_t least_normal;
  int64_t rounds_to_zero;
  double greatest;
};

DtypeRange range_of(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return {-14, -25, 65504.0};
    case at::kBFloat16:
      return {-126, -134, 0x1.FEp127};
    case at::kFloat:
      return {-126, -150, 0x1.FFFFFEp127};
    default:
      TORCH_CHECK_TYPE(false, "NumberRange: expected dtype to be Half, BFloat16 or Float, got ",
                       dtype);
  }
}

double from_bits(int64_t bits) {
  return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
}

}  // namespace

NumberRange::NumberRange() : counts_(kernels::kExponentColumns) {}

NumberRange NumberRange::of(const at::Tensor& tensor) { return of_each({tensor}).front(); }

std::vector<NumberRange> NumberRange::of_each(at::TensorList tensors) {
  if (tensors.empty()) {
    return {};
  }
  TORCH_CHECK_VALUE(tensors.front().defined(),
                    "NumberRange: expected tensors[0] to be a tensor, got an undefined one");
  const at::NoGradGuard no_grad;
  const auto rows = static_cast<int64_t>(tensors.size());
  const auto table =
      at::zeros({rows, kernels::kExponentColumns}, tensors.front().options().dtype(at::kLong));
  ops::count_exponents_(tensors, table);
  const auto host = table.cpu();  // sync: the result is on the host
  std::vector<NumberRange> ranges;
  ranges.reserve(tensors.size());
  for (int64_t i = 0; i < rows; ++i) {
    ranges.push_back(of_row(host[i]));
  }
  return ranges;
}

NumberRange NumberRange::of_row(const at::Tensor& row) {
  TORCH_CHECK_VALUE(row.numel() == kernels::kExponentColumns && row.is_contiguous(),
                    "NumberRange: expected a contiguous row of ", kernels::kExponentColumns,
                    " numbers, got shape ", row.sizes());
  NumberRange range;
  std::copy_n(row.const_data_ptr<int64_t>(), kernels::kExponentColumns, range.counts_.begin());
  return range;
}

NumberRange& NumberRange::operator+=(const NumberRange& other) {
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const bool counts = i < kernels::kExponentBins;
    counts_[i] = counts ? counts_[i] + other.counts_[i] : std::max(counts_[i], other.counts_[i]);
  }
  return *this;
}

int64_t NumberRange::elements() const {
  int64_t sum = 0;
  for (std::size_t i = 0; i < kernels::kExponentBins; ++i) {
    sum += counts_[i];
  }
  return sum;
}

int64_t NumberRange::at_exponent(int64_t exponent) const {
  const auto column = exponent + kBias;
  TORCH_CHECK_VALUE(column >= 0 && std::cmp_less(column, kInf),
                    "at_exponent: expected an exponent from -127 to 127, got ", exponent);
  return counts_[static_cast<std::size_t>(column)];
}

double NumberRange::greatest() const { return from_bits(counts_[kernels::kGreatestColumn]); }

double NumberRange::least() const {
  const auto bits = counts_[kernels::kLeastColumn];
  return bits == 0 ? 0.0 : from_bits(int64_t{kernels::kInfBits<float>} - bits);
}

/// Finite elements that are not 0 and smaller than 2^exponent.
int64_t NumberRange::below(int64_t exponent) const {
  int64_t sum = 0;
  const auto end = std::clamp<int64_t>(exponent + kBias, 0, kInf);
  for (int64_t i = 0; i < end; ++i) {
    sum += counts_[static_cast<std::size_t>(i)];
  }
  return sum;
}

double NumberRange::share_of_zeros(c10::ScalarType dtype, int64_t shift) const {
  const auto all = std::max<int64_t>(elements(), 1);
  const auto lost = zeros() + below(range_of(dtype).rounds_to_zero - shift);
  return static_cast<double>(lost) / static_cast<double>(all);
}

double NumberRange::share_of_subnormals(c10::ScalarType dtype, int64_t shift) const {
  const auto all = std::max<int64_t>(elements(), 1);
  const auto range = range_of(dtype);
  const auto count = below(range.least_normal - shift) - below(range.rounds_to_zero - shift);
  return static_cast<double>(count) / static_cast<double>(all);
}

std::optional<int64_t> NumberRange::largest_shift(c10::ScalarType dtype) const {
  const double most = range_of(dtype).greatest;
  if (greatest() == 0.0) {
    return std::nullopt;
  }
  auto shift = static_cast<int64_t>(std::floor(std::log2(most / greatest())));
  while (std::ldexp(greatest(), static_cast<int>(shift)) > most) {  // log2 is rounded
    --shift;
  }
  return shift;
}

}  // namespace fastamp
