#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace fastamp::autocast {

/// Where a cast was computed: work queued elsewhere must not use it. All zero on CPU.
struct ExecutionContext {
  c10::StreamId stream = 0;
  std::uint64_t graph_capture = 0;  ///< CUDA graph being captured, 0 if none.

  bool operator==(const ExecutionContext&) const = default;
};

/// The stream and graph capture that work on `device` goes to now.
ExecutionContext execution_context(c10::Device device);

/// Whether the context on `device` can be told, so that casts may be kept. False for CUDA in a
/// build without CUDA.
bool knows_execution_context(c10::DeviceType device);

/// CUDA half, compiled only with CUDA: id of the graph that `stream` is being captured into, 0 if
/// none.
std::uint64_t graph_capture_id(c10::Stream stream);

}  // namespace fastamp::autocast
