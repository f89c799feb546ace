// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/decision.h"
#include "float8/float8_cast.h"
#include "trace/events.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

// Casts of the weights of products in fp8, and where they are kept.
namespace fastamp::autocast {

/// Finds the parameter that an operand is, if it is one: its cast is kept for the region.
struct WeightSource {
  const at::Tensor* weight = nullptr;
  bool is_transposed = false;  ///< The operand is `weight.t()`.
  bool is_kept = false;        ///< Its cast outlives the region, because that was requested.
};

WeightSource source_of(const at::Tensor& operand, Float8Path path);

/// Notifies an open trace of a cast.
void note_float8_cast(CastEvent event, const Float8Cast& cast);

/// The cast of a parameter, kept for the region at least. The first one of a region brings along
/// the others that are cast together with it on request.
Float8Cast cast_parameter(const WeightSource& source, c10::ScalarType to, Float8Wanted wanted);

}  // namespace fastamp::autocast
