// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Stream.h>

#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStream {
 public:
  explicit CUDAStream(emulator::Stream& stream) : stream_(&stream) {}
  operator cudaStream_t() const { return stream_; }
  cudaStream_t stream() const { return stream_; }
  c10::Stream unwrap() const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCPU), stream_->id());
  }
  c10::DeviceIndex device_index() const { return 0; }
  c10::StreamId id() const { return stream_->id(); }

 private:
  emulator::Stream* stream_;
};

inline CUDAStream getCurrentCUDAStream() { return CUDAStream(emulator::current_stream()); }

}  // namespace c10::cuda
