// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/node_ptr.h"

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <typeinfo>

namespace fastamp::autocast {

/// The place of a node among those of a thread: backward passes run the latest node first, and so
/// sum gradients in this order.
using NodeOrder = std::uint64_t;

/// The place that a node made now would have; no other node gets it.
NodeOrder take_node_order();

/// Whether autograd records ops on this tensor now, in the sense of the generated autograd kernels.
bool is_recorded(const at::Tensor& tensor);

/// Records in autograd that `out`, which has no history yet, is the cast of `source`.
void record_cast(const at::Tensor& source, const at::Tensor& out, NodeOrder order);
void record_cast(const at::Tensor& source, const at::Tensor& out);

/// Does so as if `source` had other options, those of the gradients that it is to get.
void record_cast_from(const at::Tensor& source, const at::TensorOptions& options,
                      const at::Tensor& out);

/// Makes `out`, which has no history yet, require a gradient as a cast of `source` does, through a
/// node that leads nowhere and keeps nothing alive.
void require_grad_alone(const at::Tensor& source, const at::Tensor& out);

/// Whether nothing but the history of `cast`, which nothing but the caller refers to, holds the
/// leaf that it was cast from: nobody can use that leaf again.
bool is_sole_user_of_source(const at::Tensor& cast);

/// Type of the nodes that record_cast makes, for the Python module to name them.
FASTAMP_API const std::type_info& cast_node_type();

/// A node of torch's own for a cast, outside any graph. No tensor is made for it, so it is the same
/// in every mode the caller may be in.
FASTAMP_API NodePtr torchs_cast_node();

}  // namespace fastamp::autocast
