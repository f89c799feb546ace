// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/float8_cast.h"
#include "float8/linear_backward.h"
#include "float8/recipe.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

// A rank's part of a linear layer in fp8 whose tensors are spread over ranks. Which part it is, and
// how ranks agree, knows Python (python/fastamp/_float8/shards.py). Exported for it.
namespace fastamp::autocast {

/// Facts that a part of a product has of the whole. Tensors that are undefined: the operand is
/// whole.
struct Float8Parts {
  at::Tensor x_amax;       ///< float8_amax() of the whole x.
  at::Tensor weight_amax;  ///< The same of the weight.
  Float8Cast weight;       ///< The weight's cast as it came, its rows alone; else undefined.
  bool adds_bias = true;   ///< Of ranks whose products are summed, one adds the bias.
  AgreeOnAmax agree;       ///< See record_float8_product().
};

/// x times a weight [N, K], plus a bias, of one rank: what `linear` in a region with this setting
/// does, by the casts that the whole would have. Recorded in autograd. The operands are such that
/// fp8 is possible, which is not checked again.
FASTAMP_API at::Tensor float8_linear_of_parts(const Float8Setting& setting, const at::Tensor& x,
                                              const at::Tensor& weight, const at::Tensor& bias,
                                              const Float8Parts& parts);

/// Python's linear layer of tensors that are spread over ranks. The functions take the GIL.
struct LinearOfParts {
  /// Whether a weight is of a class that it knows.
  bool (*is_part)(const at::Tensor& weight);
  /// The product; undefined if it has none for tensors that are spread so.
  at::Tensor (*run)(const Float8Setting& setting, const at::Tensor& x, const at::Tensor& weight,
                    const at::Tensor& bias);
};

/// Set once by the Python module, while other threads may run ops; lives as long as the process.
FASTAMP_API void set_linear_of_parts(const LinearOfParts* functions);

}  // namespace fastamp::autocast
