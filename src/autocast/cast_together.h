// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cast_plans.h"
#include "autocast/cast_source.h"

#include <fastamp/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <vector>

// Casting the weights of a region in one launch.
namespace fastamp::autocast {

/// Number of open requests to cast weights together.
extern std::atomic<int> g_together_requests;

inline bool is_casting_together() {
  return g_together_requests.load(std::memory_order_relaxed) != 0;
}

FASTAMP_API std::uint64_t acquire_cast_together(const std::vector<at::Tensor>& weights);
FASTAMP_API void release_cast_together(std::uint64_t id);

/// The weights to be cast with the first one that the region casts to this dtype: of those that the
/// last region like this one used, the ones that open requests name. Empty if none names `weight`.
std::vector<WeightToCast> weights_to_cast_with(const at::Tensor& weight, c10::ScalarType to);

/// Casts the data of a weight that the region has not cast yet, and with it those of the weights
/// that the last region like this one used, which the region keeps. Undefined, with nothing done,
/// if the weight is not requested, or no other weight can be cast with it.
at::Tensor cast_with_others(const CastSource& source, c10::ScalarType to);

}  // namespace fastamp::autocast
