// SPDX-License-Identifier: Apache-2.0
#include "autocast/make/graph_capture.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

namespace fastamp::autocast {

std::uint64_t graph_capture_id(c10::Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(c10::cuda::CUDAStream(stream).stream(), &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

}  // namespace fastamp::autocast
