// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace fastamp::scaler {

/// Work that was captured and can be repeated.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  virtual void replay() = 0;

 protected:
  CapturedGraph() = default;
  CapturedGraph(const CapturedGraph&) = default;
  CapturedGraph(CapturedGraph&&) = default;
  CapturedGraph& operator=(const CapturedGraph&) = default;
  CapturedGraph& operator=(CapturedGraph&&) = default;
};

/// What comes before a replay, in this order.
struct CapturePhases {
  std::function<void()> warm;    ///< On the stream of the capture: what it makes does not last.
  std::function<void()> states;  ///< On the current stream: makes memory that outlives the graph.
  std::function<void()> work;    ///< Captured.
};

/// Runs the phases and waits for the device. Freed memory goes back to the stream that it was made
/// on: were that the capture's, states that are freed while a replay runs on another stream could
/// be handed out again before the replay has read them.
/// @throws c10::NotImplementedError in a build without CUDA; what the phases throw.
std::unique_ptr<CapturedGraph> capture_graph(c10::Device device, const CapturePhases& phases);

}  // namespace fastamp::scaler
