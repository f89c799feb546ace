// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/capture_graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

namespace fastamp::kernels::cuda {
namespace {

class CudaGraph final : public CapturedGraph {
 public:
  void capture(const std::function<void()>& work) {
    // Only calls of this thread can break it: a loader that pins memory may be at work.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      try {
        graph_.capture_end();        // Else the stream stays in capture mode.
      } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): the first error counts
      }
      throw;
    }
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<CapturedGraph> capture_graph(c10::Device device, const CapturePhases& phases) {
  const c10::cuda::CUDAGuard on_device(device);
  auto graph = std::make_unique<CudaGraph>();
  const auto outside = c10::cuda::getCurrentCUDAStream(device.index());
  const auto side = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
  outside.synchronize();  // sync: once, before the first step
  {
    const c10::cuda::CUDAStreamGuard on_side(side);
    phases.warm();
  }
  side.synchronize();
  phases.states();
  outside.synchronize();
  const c10::cuda::CUDAStreamGuard on_side(side);
  graph->capture(phases.work);
  return graph;
}

}  // namespace fastamp::kernels::cuda
