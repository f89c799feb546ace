// SPDX-License-Identifier: Apache-2.0
#pragma once

// The code for CUDA is a library of its own, libfastamp_cuda.so, which lies beside libfastamp.so
// and needs torch's CUDA libraries. libfastamp.so needs none: it opens the other one when CUDA is
// first asked for, where torch has CUDA, and calls it through the tables here. Whether there is
// code for CUDA is decided in this file's source and nowhere else.

#include "core/captured_graph.h"

#include <fastamp/macros.h>
#include <fastamp/version.h>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/version.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace fastamp {

namespace kernels {
struct CudaKernels;
}  // namespace kernels

/// Functions of CUDA itself.
struct CudaDevices {
  /// Capability of the current device, such as 90 for 9.0.
  int (*compute_capability)();
  /// Identity of the graph that a CUDA stream is being captured into, 0 if none.
  std::uint64_t (*graph_capture_id)(c10::Stream stream);
  /// Whether the current stream is being captured.
  bool (*is_capturing)();
  /// Runs the phases and waits for the device. Freed memory goes back to the stream that it was
  /// made on: were that the capture's, states that are freed while a replay runs on another stream
  /// could be handed out again before the replay has read them. Throws what the phases throw.
  std::unique_ptr<CapturedGraph> (*capture_graph)(c10::Device device, const CapturePhases& phases);
};

/// All that the library with the code for CUDA offers.
struct CudaPart {
  const char* build;  ///< kCudaPartBuild of that library: the tables of another one are others.
  CudaDevices devices;
  const kernels::CudaKernels* kernels;
};

inline constexpr auto kCudaPartBuild = "fastamp " FASTAMP_VERSION ", torch " TORCH_VERSION;

/// The code for CUDA; null where there is none. Opens its library at the first call that finds
/// torch's CUDA part in the process, once; warns if there is one that cannot be used. Thread-safe.
const CudaPart* cuda_part();

/// Why cuda_part() is null, as a part of a sentence ("torch has no CUDA"); "" where it is not.
std::string cuda_part_refusal();

/// Whether the current stream of a device is being captured: it runs later, nothing can be read.
FASTAMP_API bool is_captured(c10::Device device);

}  // namespace fastamp
