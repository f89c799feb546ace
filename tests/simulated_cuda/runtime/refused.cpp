// SPDX-License-Identifier: Apache-2.0
//
// The functions of the runtime that are not simulated. Nothing of CUDA is included: these functions
// are what they are in name only, and read none of their arguments.

namespace simulated_cuda {

/// Counts the call and prints its name (calls.cpp); returns cudaErrorNotSupported.
int refuse(const char* function);

}  // namespace simulated_cuda

extern "C" {

#define SIMULATED(name, capture)
#define REFUSED(name) \
  int name() { return simulated_cuda::refuse(#name); }
#include "simulated_cuda/runtime/functions.inc"
#undef SIMULATED
#undef REFUSED

}  // extern "C"
