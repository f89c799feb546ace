// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>

#include <cstdint>

// A copy of what set_thread_float8() has set, where torch can see it. dynamo's guards compare the
// autocast state of every device type, whether or not this build of torch has such devices: with
// two spare ones as the copy, compiled code knows under which recipes it was traced. Never read to
// find out what is in force. Exported for the Python module; not part of the public API.
namespace fastamp::autocast {

/// Shows torch the settings of this thread, by their numbers; 0 for none.
void mirror_float8(std::uint32_t cpu, std::uint32_t cuda) noexcept;

/// Whether there are codes left for the settings of regions to come: a process may use some 1900
/// different pairs. The pairs after those look like no recipe.
FASTAMP_API bool can_mirror_float8() noexcept;

}  // namespace fastamp::autocast
