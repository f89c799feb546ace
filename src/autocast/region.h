#pragma once

#include <fastamp/autocast/guard.h>

// Exported for the Python module; not part of the public API.
namespace fastamp::autocast {

using detail::AutocastState;

/// Sets torch's autocast state to `wanted` and returns what it was. The device must be one torch
/// autocasts.
FASTAMP_API AutocastState enter_region(const AutocastState& wanted);

/// Ends the region that returned `saved`. Regions may end in any order.
FASTAMP_API void exit_region(const AutocastState& saved) noexcept;

}  // namespace fastamp::autocast
