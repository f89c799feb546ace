// SPDX-License-Identifier: Apache-2.0
#pragma once

// Executes the kernels of src/kernels/cuda on the CPU, from the sources that nvcc compiles, so that
// results, bounds and races are tested where there is no GPU. The sources are compiled as C++: the
// headers of shim/ stand in for those of CUDA and of torch's CUDA part, and for the one file of
// fastamp's that only nvcc can read, kernels/cuda/launch.cuh.
//
// What is modelled
// - Threads (fibers.h, grid.h). Each CUDA thread is a fiber, each block an OS thread. Threads and
//   blocks run in order, in reverse or in a random order that changes at each barrier.
// - Barriers, shuffles, votes (collectives.h). Waiting for a thread that never comes, different
//   barriers within a block, lanes outside the mask: all end the program and name file and line.
// - Memory order (memory_order.h), under ThreadSanitizer. Barriers, fences with atomics, and the
//   order of a stream are the only things that order accesses. A missing fence is reported although
//   the blocks run one by one.
// - Memory. Tensors and workspaces have exact sizes, with red zones under AddressSanitizer.
// - Streams and graphs (runtime.h). A stream can run late, when it is waited for: what the host
//   frees or reuses too early is then a use after free. Work on two streams is not ordered. Under
//   capture, calls that CUDA refuses are refused.
// - Arguments are taken by value at the launch, and have to fit what the driver takes.
//
// What is not: time, caches, registers, the limits of drivers and of ptxas; stale or reordered
// reads (ThreadSanitizer's happens-before stands in for them); what nvcc makes of the code, and
// device maths where it differs from the C library's; several devices; libraries. docs/cuda.md has
// more.

#include "cuda_on_cpu/emulator/grid.h"
#include "cuda_on_cpu/emulator/runtime.h"
