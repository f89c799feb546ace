// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Weights whose products stay out of fp8. For the whole process; thread-safe. Exported for the
// Python module.
namespace fastamp::autocast {

/// Excludes weights until end_float8_exclusion() is called with the returned number.
FASTAMP_API std::uint64_t exclude_from_float8(const std::vector<at::Tensor>& weights);
FASTAMP_API void end_float8_exclusion(std::uint64_t id);

FASTAMP_API bool is_excluded_from_float8(const at::Tensor& weight);

/// Whether any weight may be.
FASTAMP_API bool are_weights_excluded_from_float8() noexcept;

}  // namespace fastamp::autocast
