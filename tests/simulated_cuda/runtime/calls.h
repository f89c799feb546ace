// SPDX-License-Identifier: Apache-2.0
#pragma once

// What all calls of the runtime have in common: the table of functions, counters, errors of the
// thread, refusals under capture and after a fork.

#include "simulated_cuda/simulated_cuda.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace simulated_cuda {

enum class Function : std::uint8_t {
#define SIMULATED(name, capture) name,
#define REFUSED(name) name,
#include "simulated_cuda/runtime/functions.inc"
#undef SIMULATED
#undef REFUSED
  kCount
};

/// What is counted beside the calls of each function.
enum class Count : std::uint8_t {
  launches,           ///< Kernels that a program launches: fastamp's.
  operators,          ///< Operators of torch's.
  waits,              ///< Calls in which the host waits for work that may be done already.
  waits_for_undone,   ///< Those for events whose work is not done: in late mode alone.
  copies_to_device,   ///< From the host.
  copies_to_host,     ///< From a device.
  copies_on_devices,  ///< On a device, or from one to another.
  collectives,        ///< Calls of NCCL that move data.
  kCount
};
void count(Count what);

/// What a thread has of its own.
struct ThreadState {
  int device = 0;
  cudaError_t error = cudaSuccess;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
};
ThreadState& thread_state();

/// Guards streams, events, graphs and kernels. Work runs under it.
std::recursive_mutex& state_mutex();

/// Counts a call; returns why it is refused, or cudaSuccess.
cudaError_t begin_call(Function function);
/// Keeps an error for cudaGetLastError; returns it.
cudaError_t end_call(cudaError_t result);

/// A function of the runtime: `body` returns its result.
template <typename Body>
cudaError_t call(Function function, const Body& body) {
  const std::scoped_lock lock(state_mutex());
  const cudaError_t refused = begin_call(function);
  return end_call(refused == cudaSuccess ? body() : refused);
}

/// Prints on stderr why a call fails, where CUDA's error says less; returns the error.
[[gnu::format(printf, 2, 3)]] cudaError_t because(cudaError_t error, const char* format, ...);

const char* name_of(cudaError_t error);
const char* text_of(cudaError_t error);

}  // namespace simulated_cuda
