// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/devices.h"

#include "kernels/cuda/capture_graph.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

namespace fastamp::kernels::cuda {
namespace {

int compute_capability() {
  const auto* const device = at::cuda::getCurrentDeviceProperties();
  return 10 * device->major + device->minor;
}

c10::DeviceIndex current_gpu() {
  return c10::cuda::device_count() == 0 ? c10::DeviceIndex{-1} : c10::cuda::current_device();
}

std::optional<GpuProperties> gpu_properties(c10::DeviceIndex index) {
  if (index < 0 || index >= c10::cuda::device_count()) {
    return std::nullopt;
  }
  const auto* const device = at::cuda::getDeviceProperties(index);
  int kilohertz = 0;
  int bits = 0;
  // No error where a driver does not know them. cudaDeviceProp has lost the clock in CUDA 13.
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, index) != cudaSuccess ||
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, index) != cudaSuccess) {
    kilohertz = 0;
    (void)cudaGetLastError();
  }
  return GpuProperties{.name = device->name,
                       .capability = 10 * device->major + device->minor,
                       .multiprocessors = device->multiProcessorCount,
                       .peak_bandwidth = 2 * 1e3 * kilohertz * bits / 8};  // Both clock edges.
}

std::uint64_t graph_capture_id(c10::Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(c10::cuda::CUDAStream(stream).stream(), &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace

CudaDevices devices() {
  return {
      .compute_capability = compute_capability,
      .current_gpu = current_gpu,
      .gpu_properties = gpu_properties,
      .graph_capture_id = graph_capture_id,
      .is_capturing = is_capturing,
      .capture_graph = capture_graph,
  };
}

}  // namespace fastamp::kernels::cuda
