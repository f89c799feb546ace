// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/op_ids.h"
#include "autocast/policy_device.h"
#include "float8/linear_backward.h"
#include "float8/recipe.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <optional>
#include <type_traits>

// The ops that a recipe runs in fp8. Each is brought into one form, x times a weight, plus a bias.
namespace fastamp::autocast {

template <OpId kOp>
using OpTag = std::integral_constant<OpId, kOp>;

constexpr bool can_run_in_float8(OpId op) {
  return op == OpId::linear || op == OpId::addmm || op == OpId::mm || op == OpId::matmul;
}

/// The op's result, or an undefined tensor if the product stays in the carrier; an open trace is
/// told why. The key of autocast is excluded.
at::Tensor float8_linear(PolicyDevice device, const Float8Setting& setting, Float8Op op,
                         const Float8Operands& operands);

/// The same for an op that computes something else with these arguments than x times a weight.
at::Tensor refuse_float8_arguments(Float8Op op);

inline at::Tensor run_in_float8(OpTag<OpId::linear> /*op*/, PolicyDevice device,
                                const Float8Setting& setting, const at::Tensor& x,
                                const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return float8_linear(device, setting, Float8Op::linear,
                       {x, weight, bias.has_value() ? *bias : at::Tensor(), false});
}

inline at::Tensor run_in_float8(OpTag<OpId::mm> /*op*/, PolicyDevice device,
                                const Float8Setting& setting, const at::Tensor& x,
                                const at::Tensor& weight) {
  return x.dim() == 2 ? float8_linear(device, setting, Float8Op::mm, {x, weight, {}, true})
                      : refuse_float8_arguments(Float8Op::mm);
}

inline at::Tensor run_in_float8(OpTag<OpId::matmul> /*op*/, PolicyDevice device,
                                const Float8Setting& setting, const at::Tensor& x,
                                const at::Tensor& weight) {
  return float8_linear(device, setting, Float8Op::matmul, {x, weight, {}, true});
}

inline at::Tensor run_in_float8(OpTag<OpId::addmm> /*op*/, PolicyDevice device,
                                const Float8Setting& setting, const at::Tensor& bias,
                                const at::Tensor& x, const at::Tensor& weight,
                                const c10::Scalar& beta, const c10::Scalar& alpha) {
  const bool is_linear = x.dim() == 2 && beta.equal(1) && alpha.equal(1);
  return is_linear ? float8_linear(device, setting, Float8Op::addmm, {x, weight, bias, true})
                   : refuse_float8_arguments(Float8Op::addmm);
}

}  // namespace fastamp::autocast
