// SPDX-License-Identifier: Apache-2.0
#include "autocast/float8_gpu.h"

#include "core/kernel_devices.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

namespace fastamp::autocast {
namespace {

constexpr int kMaxDevices = 64;

/// What the devices were found to be. Plain pointers: nothing to destroy when the process exits.
constinit std::array<std::atomic<const Float8Gpu*>, kMaxDevices> g_gpus{};
constinit std::atomic<const Float8Gpu*> g_pretended_gpu{nullptr};

/// Made once and never destroyed: ops may run while the process exits.
const Float8Gpu* find_gpu(int index) {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  auto& slot = g_gpus.at(static_cast<std::size_t>(index));
  if (const auto* made = slot.load(std::memory_order_acquire)) {
    return made;
  }
  const auto found = gpu_properties(static_cast<c10::DeviceIndex>(index));
  if (!found.has_value() || found->capability < kFirstFloat8Capability) {
    return nullptr;
  }
  const auto* const gpu = new Float8Gpu(float8_gpu_like({.driver_name = found->name,
                                                         .capability = found->capability,
                                                         .multiprocessors = found->multiprocessors,
                                                         .peak_bandwidth = found->peak_bandwidth}));
  slot.store(gpu, std::memory_order_release);
  return gpu;
}

}  // namespace

Float8Gpu float8_gpu_like(const GpuFacts& facts) {
  const auto* const known = std::ranges::find_if(kFloat8Gpus, [&](const Float8Gpu& gpu) {
    return gpu.driver_name == facts.driver_name && gpu.capability == facts.capability &&
           gpu.multiprocessors == facts.multiprocessors;
  });
  if (known != kFloat8Gpus.end()) {
    return *known;
  }
  const auto* const later = std::ranges::find_if(
      kOtherFloat8Gpus, [&](const Float8Gpu& gpu) { return gpu.capability > facts.capability; });
  Float8Gpu gpu = *std::prev(later);
  gpu.capability = facts.capability;
  gpu.multiprocessors = facts.multiprocessors;
  gpu.carrier_rate *= facts.multiprocessors;
  gpu.float8_rate *= facts.multiprocessors;
  gpu.bandwidth = facts.peak_bandwidth > 0 ? gpu.bandwidth * facts.peak_bandwidth
                                           : kUnknownBandwidth * facts.multiprocessors;
  return gpu;
}

const Float8Gpu& float8_gpu_named(const char* function, std::string_view name) {
  const auto* const found = std::ranges::find(kFloat8Gpus, name, &Float8Gpu::name);
  if (found == kFloat8Gpus.end()) {
    std::vector<std::string_view> names;
    names.reserve(kFloat8Gpus.size());
    for (const auto& gpu : kFloat8Gpus) {
      names.push_back(gpu.name);
    }
    TORCH_CHECK_VALUE(false, function, ": expected gpu to be one of ", c10::Join(", ", names),
                      ", got '", name, "'.");
  }
  return *found;
}

const Float8Gpu* float8_gpu(c10::Device device) {
  if (const auto* pretended = g_pretended_gpu.load(std::memory_order_acquire)) {
    return pretended;
  }
  if (!device.is_cuda()) {
    return nullptr;
  }
  const int index = device.has_index() ? int{device.index()} : current_gpu();
  if (index < 0 || index >= kMaxDevices) {
    return nullptr;
  }
  const auto* const known = g_gpus[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
  return known != nullptr ? known : find_gpu(index);
}

void pretend_float8_gpu(std::string_view name) {
  g_pretended_gpu.store(name.empty() ? nullptr : &float8_gpu_named("pretend_float8_gpu", name),
                        std::memory_order_release);
}

}  // namespace fastamp::autocast
