// SPDX-License-Identifier: Apache-2.0
//
// The functions of the runtime and of NCCL that are not simulated. Nothing of CUDA is included:
// these functions are what they are in name only, and read none of their arguments.

namespace simulated_cuda {

/// Counts the call and prints its name (calls.cpp); returns cudaErrorNotSupported.
int refuse(const char* function);
/// Notes that a function of NCCL is not simulated (nccl.cpp); returns ncclInvalidUsage.
int refuse_nccl(const char* function);

}  // namespace simulated_cuda

extern "C" {

#define SIMULATED(name, capture)
#define REFUSED(name) \
  int name() { return simulated_cuda::refuse(#name); }
#include "simulated_cuda/runtime/functions.inc"
#undef SIMULATED
#undef REFUSED

#define REFUSED(name) \
  int name() { return simulated_cuda::refuse_nccl(#name); }
REFUSED(ncclCommDeregister)
REFUSED(ncclCommGetUniqueId)
REFUSED(ncclCommGrow)
REFUSED(ncclCommMemStats)
REFUSED(ncclCommRegister)
REFUSED(ncclCommResume)
REFUSED(ncclCommRevoke)
REFUSED(ncclCommShrink)
REFUSED(ncclCommSuspend)
REFUSED(ncclCommWindowDeregister)
REFUSED(ncclCommWindowRegister)
REFUSED(ncclDevCommCreate)
REFUSED(ncclDevCommDestroy)
REFUSED(ncclGather)
REFUSED(ncclGetLsaMultimemDevicePointer)
REFUSED(ncclGetPeerDevicePointer)
REFUSED(ncclGroupSimulateEnd)
REFUSED(ncclMemAlloc)
REFUSED(ncclMemFree)
REFUSED(ncclPutSignal)
REFUSED(ncclRedOpCreatePreMulSum)
REFUSED(ncclRedOpDestroy)
REFUSED(ncclSignal)
REFUSED(ncclWaitSignal)
REFUSED(ncclWinGetUserPtr)
#undef REFUSED

}  // extern "C"
