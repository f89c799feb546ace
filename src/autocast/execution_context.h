#pragma once

#include "autocast/cast_cache.h"

#include <c10/core/Device.h>

namespace fastamp::autocast {

/// The stream and graph capture that work on `device` goes to now.
ExecutionContext execution_context(c10::Device device);

/// Whether the context on `device` can be told, so that casts may be kept. False for CUDA in a
/// build without CUDA.
bool knows_execution_context(c10::DeviceType device);

/// CUDA half, compiled only with CUDA: id of the graph that `stream` is being captured into, 0 if
/// none.
std::uint64_t graph_capture_id(c10::Stream stream);

}  // namespace fastamp::autocast
