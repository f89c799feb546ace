// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/float8_cast.h"
#include "float8/recipe.h"

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastamp::autocast {

/// The product of a linear layer, as the caller gave it.
struct Float8Operands {
  const at::Tensor& x;        ///< [..., K]
  const at::Tensor& weight;   ///< [N, K], or [K, N]: see below.
  const at::Tensor& bias;     ///< [N], or undefined.
  bool weight_is_transposed;  ///< As `mm` takes it: [K, N].
};

/// Makes a float8_amax() that of a whole tensor, in place, on all ranks that hold its parts.
using AgreeOnAmax = std::function<void(const at::Tensor& amax)>;

/// Records in autograd that `y`, which has no history yet, is the product of these operands. Keeps
/// what the backward pass reads, in fp8, of x if the weight requires a gradient, of the weight,
/// laid out as [N, K], if x does: the columns, or of casts without columns the rows. Casts of which
/// nothing is to be kept are empty.
/// @param agree  Called in backward with the amax of the gradient of y, of which this is a part;
///               empty if it is no part.
void record_float8_product(const Float8Operands& operands, const Float8Setting& setting,
                           const Float8Cast& x, const Float8Cast& weight, const at::Tensor& y,
                           AgreeOnAmax agree = {});

}  // namespace fastamp::autocast
