// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace c10::cuda {

enum class CaptureStatus : int { None, Active };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return emulator::current_stream().capture != nullptr ? CaptureStatus::Active
                                                       : CaptureStatus::None;
}

/// Of the calling thread.
class CUDAStreamCaptureModeGuard {
 public:
  explicit CUDAStreamCaptureModeGuard(cudaStreamCaptureMode mode)
      : before_(emulator::set_relaxed_capture(mode == cudaStreamCaptureModeRelaxed)) {}
  ~CUDAStreamCaptureModeGuard() { emulator::set_relaxed_capture(before_); }
  CUDAStreamCaptureModeGuard(const CUDAStreamCaptureModeGuard&) = delete;
  CUDAStreamCaptureModeGuard& operator=(const CUDAStreamCaptureModeGuard&) = delete;

 private:
  bool before_;
};

}  // namespace c10::cuda
