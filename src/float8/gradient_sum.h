// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/product.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>

namespace fastamp::autocast {

/// Adds a [M, K] times b [N, K] transposed to the `.grad` that the gradient would be added to where
/// it goes, by one op and under the lock of torch's AccumulateGrad; else does nothing. So it does
/// where somebody looks at the gradient or is to get it instead (hooks, anomaly mode,
/// `torch.autograd.grad`, `create_graph`), where `.grad` is not there yet or of another dtype,
/// layout or stream, and where torch has no op for it (add_float8_product()).
/// @param node    The node that computes the gradient and is being called by autograd.
/// @param output  Which of its gradients.
/// @param dtype   Of the gradient.
/// @return Whether it has been added: `node` then returns no gradient here.
bool add_to_gradient(torch::autograd::Node& node, std::size_t output, Float8Matrix a,
                     Float8Matrix b, c10::ScalarType dtype, bool fast_accumulate);

/// Makes add_to_gradient() ask, of a weight with hooks that torch calls after accumulation, whether
/// none of them does anything to a float32 gradient: Python's are not known here. Thread-safe.
FASTAMP_API void ask_of_idle_hooks(bool (*are_idle)(const at::Tensor& weight));

}  // namespace fastamp::autocast
