// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moments in 8 bits between steps: which parameters have them, and what they are in float32.

#include <fastamp/macros.h>
#include <fastamp/optim/stored_state.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fastamp::optim {

/// Below this many elements a parameter's moments stay in 16 bits.
inline constexpr std::int64_t kLeastCodes = 4096;

/// Number of neighbours that share a scale: the greatest of 128, 64 and 32 that divides a row of
/// the first dimension, so that no group crosses rows and shards of rows keep their groups. 0 if
/// none does, or if the parameter is a vector or small.
/// @param sizes  Of the whole parameter, never of a shard: the same on all ranks.
FASTAMP_API std::int64_t moment_group(at::IntArrayRef sizes);

/// Zeros, as codes and scales are at first.
/// @param group  moment_group() of the whole parameter.
EncodedMoments zero_codes(const at::Tensor& param, std::int64_t group);

/// Whether codes of these shapes are those of a parameter whose groups are that long.
bool fit_param(const EncodedMoments& codes, const at::Tensor& param, std::int64_t group);

}  // namespace fastamp::optim
