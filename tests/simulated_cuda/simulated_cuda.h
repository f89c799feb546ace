// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the parts of the simulated CUDA device share.
//
// - runtime/ stands in for libcudart and libcuda, and provides what is declared here.
// - redirect/ runs torch's operators on CUDA tensors by torch's kernels for the CPU.
// - kernels/ has fastamp's kernels as the emulator compiles them (tests/cpp/cuda_on_cpu).

#include <cuda_runtime_api.h>

#include <functional>

namespace simulated_cuda {

using Work = std::function<void()>;

/// Whether SIMULATED_CUDA_TRACE is set: each call, kernel and operator is printed on stderr.
bool traces();

/// Adds a node to the graph that the stream is captured for; does not run it now.
void record(cudaStream_t stream, Work work, const char* name);
/// Runs all that was put on the stream before.
void flush(cudaStream_t stream);
bool is_capturing(cudaStream_t stream);

/// Where the host may see device memory; other addresses are returned as they are.
void* host_view(const void* memory);

/// Counts an operator that redirect/ has run in a kernel's place.
void count_operator();

}  // namespace simulated_cuda
