// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/interception.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fastamp::autocast {

/// What a tensor is to autocast, which decides where its cast may be used again.
enum class CastKind : std::uint8_t {
  weight,       ///< A float32 parameter: later ops of the region find its cast.
  kept_weight,  ///< A weight whose cast outlives the region, because that was requested.
  weight_view,  ///< A view of a whole weight: its cast is an alias of the weight's.
  activation,   ///< Other ops of the region may share the memory of its cast.
  other,        ///< Nothing else uses the cast.
};

/// A tensor that is to be cast, and what is known of it: found out once per cast, since each
/// question costs a few nanoseconds and has one answer until the op is called. Borrows the tensors.
struct CastSource {
  const at::Tensor& tensor;
  CastKind kind;
  CallPath path;  ///< Whether a cast of the tensor may be made below the dispatcher.
  const at::Tensor* base = nullptr;  ///< The weight that a weight_view is a view of.
  bool base_is_kept = false;         ///< The cast of that weight outlives the region.
};

/// torch's rule for what is worth keeping: a float32 parameter.
bool is_weight(const at::Tensor& tensor);

/// The base of `tensor`, a view that is dense in memory, if both are ordinary and have the same
/// elements there, such as `weight.t()` or `weight.view({rows, -1})` of a weight. Else null.
///
/// Casting either one then writes the same bytes.
const at::Tensor* base_of_whole_view(const at::Tensor& tensor);

/// The same for bases with another property than that ops on them may bypass the dispatcher. They
/// have storage.
const at::Tensor* base_of_whole_view_if(const at::Tensor& tensor,
                                        bool (*is_wanted)(const at::Tensor& base));

/// @param lowers  The cast is to the region's dtype; only such casts are kept or shared.
/// @param share   Whether the cast may share memory with others, as cast() says.
CastSource classify(const at::Tensor& tensor, bool lowers, bool share);

}  // namespace fastamp::autocast
