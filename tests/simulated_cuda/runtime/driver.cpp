// SPDX-License-Identifier: Apache-2.0
//
// libcuda: what torch's libraries ask of the driver. Stands for a device with a current context,
// for autograd's checks. Modules, launches, linking (NVRTC, Triton) and mapped memory are refused
// by name.
// Nothing of CUDA is included: refused functions read none of their arguments.

#include <cstdint>
#include <cstdio>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

int refuse(const char* function) {
  std::fprintf(stderr, "simulated CUDA: %s is not simulated\n", function);
  return kNotSupported;
}

}  // namespace

extern "C" {

int cuInit(unsigned /*flags*/) { return kSuccess; }

int cuDeviceGet(int* device, int index) {
  *device = index;
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int /*attribute*/, int /*device*/) {
  *value = 0;
  return kSuccess;
}

int cuDevicePrimaryCtxGetState(int /*device*/, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(std::uintptr_t* context, int device) {
  *context = static_cast<std::uintptr_t>(device) + 1;
  return kSuccess;
}

int cuCtxGetCurrent(std::uintptr_t* context) {
  *context = 1;
  return kSuccess;
}

int cuCtxSetCurrent(std::uintptr_t /*context*/) { return kSuccess; }

int cuGetErrorString(int /*error*/, const char** text) {
  *text = "an error of the simulated CUDA driver";
  return kSuccess;
}

#define REFUSED(name) \
  int name() { return refuse(#name); }
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuMemAddressFree)
REFUSED(cuMemAddressReserve)
REFUSED(cuMemCreate)
REFUSED(cuMemExportToShareableHandle)
REFUSED(cuMemGetAddressRange)
REFUSED(cuMemGetAllocationGranularity)
REFUSED(cuMemGetAllocationPropertiesFromHandle)
REFUSED(cuMemImportFromShareableHandle)
REFUSED(cuMemMap)
REFUSED(cuMemRelease)
REFUSED(cuMemRetainAllocationHandle)
REFUSED(cuMemSetAccess)
REFUSED(cuMemUnmap)
REFUSED(cuMemsetD32Async)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute)
REFUSED(cuStreamWriteValue32)
REFUSED(cuTensorMapEncodeTiled)
#undef REFUSED

}  // extern "C"
