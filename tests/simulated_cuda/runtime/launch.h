// SPDX-License-Identifier: Apache-2.0
#pragma once

// Kernels: those that programs register, and the emulated functions that run in their place.
//
// Stands for: launches by nvcc's own stubs. The emulated function is found by the name that the
// stub has registered. Does not stand for: kernels of other libraries, which are refused by name;
// shared memory that is given at the launch, clusters, cooperative groups.

#include "simulated_cuda/simulated_cuda.h"

#include <string>

namespace simulated_cuda {

void register_kernel(const void* stub, const char* name);
cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** arguments, cudaStream_t stream);

/// A function of a library beside this one; null, and printed, if there is none.
void* find_beside(const char* library, const char* function);

/// Opens redirect/, once, when a program asks for devices.
void open_redirection();

}  // namespace simulated_cuda
