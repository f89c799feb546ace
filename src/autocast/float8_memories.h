// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/float8_cast.h"

#include <ATen/core/Tensor.h>

namespace fastamp::autocast {

/// Where the ranges of the tensors that meet a weight are remembered, for scale="predicted".
struct Float8Memories {
  Float8Memory x;     ///< Of what the weight is multiplied with.
  Float8Memory grad;  ///< Of the gradient of the product.
};

/// Those of a weight, on its device, for the stream and graph capture that work on it goes to now;
/// made, empty, at their first use. The process remembers them as long as the weight lives;
/// checkpoints do not. Thread-safe.
Float8Memories float8_memories_of(const at::Tensor& weight);

}  // namespace fastamp::autocast
