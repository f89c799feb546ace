// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

namespace fastamp::autocast {

/// Id of the CUDA graph that `stream` is being captured into, 0 if none. Only in a build with CUDA.
std::uint64_t graph_capture_id(c10::Stream stream);

}  // namespace fastamp::autocast
