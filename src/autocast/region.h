// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/guard.h>
#include <fastamp/macros.h>

#include <cstddef>
#include <cstdint>

// The open autocast regions of a thread, those of C++ guards and of Python on one stack. Exported
// for the Python module; not part of the public API.
namespace fastamp::autocast {

using fastamp::detail::AutocastState;
using fastamp::detail::RegionId;

/// Kind of a region: by the class that it is an instance of.
enum class RegionKind : std::uint8_t { kFastamp, kTorch };

/// Sets torch's autocast state to `wanted` until the region ends. The device must be one torch
/// autocasts.
/// @param owner  Python's object, for exit_region_of(); null for guards, which go by the id.
/// @throws std::bad_alloc; nothing is changed then.
FASTAMP_API RegionId enter_region(const AutocastState& wanted, void* owner = nullptr,
                                  RegionKind kind = RegionKind::kFastamp);

/// Ends an open region of this thread. False, with nothing changed, if it is open on another thread
/// or not at all.
///
/// Regions may end in any order: one that ends below others hands what it would have restored on to
/// the one above it, so that the last to end leaves the state as the first one found it.
FASTAMP_API bool exit_region(RegionId id) noexcept;

struct EndedRegion {
  bool found;
  RegionKind kind;
  bool had_float8;  ///< It had put a recipe in force.
};

/// The state that a device is in on this thread, as enter_region() would restore it.
FASTAMP_API AutocastState current_state(c10::DeviceType device);

/// Number of regions that are open on this thread, but for torch's own, which fastamp does not see.
FASTAMP_API std::size_t open_regions() noexcept;

/// The owner of the innermost region, if more than `depth` are open on this thread; else null, as
/// for a guard's.
FASTAMP_API void* owner_above(std::size_t depth) noexcept;

/// Ends the innermost open region that `owner` has on this thread.
FASTAMP_API EndedRegion exit_region_of(const void* owner) noexcept;

}  // namespace fastamp::autocast
