// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace fastamp {

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

/// Steps that come before a replay, in this order.
struct CapturePhases {
  std::function<void()> warm;    ///< On the stream of the capture: what it makes does not last.
  std::function<void()> states;  ///< On the current stream: makes memory that outlives the graph.
  std::function<void()> work;    ///< Captured.
};

}  // namespace fastamp
