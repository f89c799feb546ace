// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random numbers of operators. Stands for: repeatable numbers that follow seed and offset of
// torch's generator for CUDA. Does not stand for: Philox's numbers. In graphs, seeds are counted
// instead.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace simulated_cuda {

/// The seed for one operator; moves the generator on.
std::uint64_t next_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device,
                        bool capturing);
at::Generator cpu_generator(std::uint64_t seed);

/// While one lives, the CPU's default generator has a seed. It then goes on as if nothing was
/// drawn.
class CpuSeed {
 public:
  explicit CpuSeed(std::uint64_t seed);
  ~CpuSeed();
  CpuSeed(const CpuSeed&) = delete;
  CpuSeed& operator=(const CpuSeed&) = delete;

 private:
  at::Generator generator_;
  at::Tensor before_;
};

}  // namespace simulated_cuda
