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

/// Runs `warm`, then captures `work`, both on a stream of their own. Waits for the device.
/// @throws c10::NotImplementedError in a build without CUDA; what warm and work throw.
std::unique_ptr<CapturedGraph> capture_graph(c10::Device device, const std::function<void()>& warm,
                                             const std::function<void()>& work);

}  // namespace fastamp::scaler
