// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/cast_plans.h"
#include "autocast/cast_source.h"

#include <fastamp/macros.h>

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

/// Whether an open request names the weight,
bool is_cast_together(const at::Tensor& weight);
/// and those of some weights that one names.
std::vector<WeightToCast> those_cast_together(const std::vector<WeightToCast>& weights);

/// Casts the data of a weight that the region has not cast yet, and with it those of the weights
/// that the last region like this one used, which the region keeps. Undefined, with nothing done,
/// if the weight is not requested, or no other weight can be cast with it.
at::Tensor cast_with_others(const CastSource& source, c10::ScalarType to);

}  // namespace fastamp::autocast
