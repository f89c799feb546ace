// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/devices.h"

#include "kernels/cuda/capture_graph.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

namespace fastamp::kernels::cuda {
namespace {

int compute_capability() {
  const auto* const device = at::cuda::getCurrentDeviceProperties();
  return 10 * device->major + device->minor;
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
      .graph_capture_id = graph_capture_id,
      .is_capturing = is_capturing,
      .capture_graph = capture_graph,
  };
}

}  // namespace fastamp::kernels::cuda
