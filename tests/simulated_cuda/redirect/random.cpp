// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/redirect/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <atomic>
#include <mutex>

namespace simulated_cuda {
namespace {

/// SplitMix64's finaliser.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15ULL + b + 0x7f4a7c15ULL;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31U);
}

}  // namespace

std::uint64_t next_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device,
                        bool capturing) {
  static std::atomic<std::uint64_t> in_graphs{0};
  if (capturing) {
    return mix(0x5eed, ++in_graphs);
  }
  auto generator = given.has_value() && given->defined()
                       ? *given
                       : at::cuda::detail::getDefaultCUDAGenerator(device);
  const std::scoped_lock lock(generator.mutex());
  auto* const impl = at::check_generator<at::CUDAGeneratorImpl>(generator);
  const auto offset = impl->philox_offset_per_thread();
  impl->set_philox_offset_per_thread(offset + 4);
  return mix(impl->current_seed(), offset);
}

at::Generator cpu_generator(std::uint64_t seed) { return at::detail::createCPUGenerator(seed); }

CpuSeed::CpuSeed(std::uint64_t seed)
    : generator_(at::detail::getDefaultCPUGenerator()), before_(generator_.get_state()) {
  generator_.set_current_seed(seed);
}

CpuSeed::~CpuSeed() { generator_.set_state(before_); }

}  // namespace simulated_cuda
