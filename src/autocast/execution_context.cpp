#include "autocast/execution_context.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fastamp::autocast {

ExecutionContext execution_context(c10::Device device) {
  if (device.type() != c10::DeviceType::CUDA) {
    return {};
  }
#ifdef FASTAMP_WITH_CUDA
  const auto* cuda = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  static const bool has_device = cuda->deviceCount() > 0;
  if (!has_device) {
    return {};  // A fake tensor.
  }
  const auto stream = cuda->getStream(device);
  return {stream.id(), graph_capture_id(stream)};
#else
  return {};
#endif
}

bool knows_execution_context(c10::DeviceType device) {
#ifdef FASTAMP_WITH_CUDA
  return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
#else
  return device == c10::DeviceType::CPU;
#endif
}

}  // namespace fastamp::autocast
