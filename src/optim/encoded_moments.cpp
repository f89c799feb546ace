// SPDX-License-Identifier: Apache-2.0
// Checkpoints and changes of layout encode and decode on the CPU, wherever the tensors are: once,
// by the functors of the steps.

#include "optim/encoded_moments.h"

#include "kernels/functors/moment_codes.h"

#include <ATen/core/TensorAccessor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>

namespace fastamp::optim {
namespace {

using kernels::FirstMomentCodes;
using kernels::SecondMomentCodes;

at::Tensor host_copy(const at::Tensor& t, at::ScalarType dtype) {
  return t.detach().to(at::kCPU, dtype).contiguous();
}

/// @param number  0 for first moments, 1 for second ones.
template <typename Codes>
void encode(const at::Tensor& moments, std::int64_t group, std::int64_t number, at::Tensor& codes,
            at::Tensor& scales) {
  const auto* in = moments.const_data_ptr<float>();
  auto* out = codes.mutable_data_ptr<std::uint8_t>();
  auto* scale_of = scales.mutable_data_ptr<std::uint8_t>() + number;
  for (std::int64_t at = 0; at < moments.numel(); at += group) {
    std::uint32_t greatest = 0;
    for (std::int64_t i = at; i < at + group; ++i) {
      greatest = std::max(greatest, kernels::bits_of(in[i]) & 0x7fffffffU);
    }
    const std::uint32_t scale = Codes::scale(greatest);
    scale_of[at / group * 2] = static_cast<std::uint8_t>(scale);
    for (std::int64_t i = at; i < at + group; ++i) {
      out[i] = static_cast<std::uint8_t>(Codes::nearest(in[i], scale));
    }
  }
}

template <typename Codes>
at::Tensor decode(const at::Tensor& codes, const at::Tensor& scales, std::int64_t number) {
  const auto coded = host_copy(codes, at::kByte);
  const auto scale_bytes = host_copy(scales, at::kByte);
  auto moments = at::empty(coded.sizes(), at::kFloat);
  const auto groups = scale_bytes.numel() / 2;
  if (groups == 0) {
    return moments;
  }
  const auto group = coded.numel() / groups;
  const auto* in = coded.const_data_ptr<std::uint8_t>();
  const auto* scale_of = scale_bytes.const_data_ptr<std::uint8_t>() + number;
  auto* out = moments.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < coded.numel(); ++i) {
    out[i] = Codes::decode(in[i], scale_of[i / group * 2]);
  }
  return moments;
}

std::int64_t row_of(at::IntArrayRef sizes) {
  std::int64_t row = 1;
  for (const auto size : sizes.slice(1)) {
    row *= size;
  }
  return row;
}

void check_codes(const EncodedMoments& codes) {
  for (const auto* t : {&codes.exp_avg, &codes.exp_avg_sq, &codes.scales}) {
    TORCH_CHECK_VALUE(t->defined(), "decode_moments: expected three tensors, got an undefined one");
    TORCH_CHECK_TYPE(t->scalar_type() == at::kByte, "decode_moments: expected Byte tensors, got ",
                     t->scalar_type());
  }
  const auto& scales = codes.scales;
  const bool fits = codes.exp_avg.dim() > 0 && codes.exp_avg.sizes() == codes.exp_avg_sq.sizes() &&
                    scales.dim() == 3 && scales.size(0) == codes.exp_avg.size(0) &&
                    scales.size(2) == 2 &&
                    (scales.size(1) == 0 ? codes.exp_avg.numel() == 0
                                         : row_of(codes.exp_avg.sizes()) % scales.size(1) == 0);
  TORCH_CHECK_VALUE(fits,
                    "decode_moments: expected codes of one shape and scales of shape [rows, "
                    "groups of a row, 2], got shapes ",
                    codes.exp_avg.sizes(), ", ", codes.exp_avg_sq.sizes(), " and ", scales.sizes());
}

}  // namespace

std::int64_t moment_group(at::IntArrayRef sizes) {
  if (sizes.size() < 2 || sizes[0] * row_of(sizes) < kLeastCodes) {
    return 0;
  }
  const auto row = row_of(sizes);
  for (const std::int64_t group : {128, 64, 32}) {
    if (row % group == 0) {
      return group;
    }
  }
  return 0;
}

EncodedMoments zero_codes(const at::Tensor& param, std::int64_t group) {
  const auto options = at::TensorOptions(at::kByte).device(param.device());
  const auto rows = param.size(0);
  return {at::zeros(param.sizes(), options), at::zeros(param.sizes(), options),
          at::zeros({rows, row_of(param.sizes()) / group, 2}, options)};
}

bool fit_param(const EncodedMoments& codes, const at::Tensor& param, std::int64_t group) {
  return codes.exp_avg.sizes() == param.sizes() && codes.exp_avg_sq.sizes() == param.sizes() &&
         codes.scales.defined() && codes.scales.dim() == 3 &&
         codes.scales.size(0) == param.size(0) &&
         codes.scales.size(1) == row_of(param.sizes()) / group && codes.scales.size(2) == 2;
}

EncodedMoments encode_moments(const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                              std::int64_t group) {
  TORCH_CHECK_VALUE(exp_avg.defined() && exp_avg_sq.defined(),
                    "encode_moments: expected two tensors, got an undefined one");
  TORCH_CHECK_VALUE(exp_avg.dim() > 0 && exp_avg.sizes() == exp_avg_sq.sizes(),
                    "encode_moments: expected two tensors of one shape with a dimension, got "
                    "shapes ",
                    exp_avg.sizes(), " and ", exp_avg_sq.sizes());
  TORCH_CHECK_VALUE(
      (group == 32 || group == 64 || group == 128) && row_of(exp_avg.sizes()) % group == 0,
      "encode_moments: expected a group of 32, 64 or 128 that divides a row of shape ",
      exp_avg.sizes(), ", got ", group);
  auto codes = zero_codes(host_copy(exp_avg, at::kFloat), group);
  encode<FirstMomentCodes>(host_copy(exp_avg, at::kFloat), group, 0, codes.exp_avg, codes.scales);
  encode<SecondMomentCodes>(host_copy(exp_avg_sq, at::kFloat), group, 1, codes.exp_avg_sq,
                            codes.scales);
  const auto device = exp_avg.device();
  return {codes.exp_avg.to(device), codes.exp_avg_sq.to(device), codes.scales.to(device)};
}

std::pair<at::Tensor, at::Tensor> decode_moments(const EncodedMoments& codes) {
  check_codes(codes);
  const auto device = codes.exp_avg.device();
  return {decode<FirstMomentCodes>(codes.exp_avg, codes.scales, 0).to(device),
          decode<SecondMomentCodes>(codes.exp_avg_sq, codes.scales, 1).to(device)};
}

}  // namespace fastamp::optim
