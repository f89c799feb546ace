// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for src/kernels/cuda/launch.cuh, which only nvcc can read.

#include <c10/cuda/CUDAException.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace fastamp::kernels::cuda {

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, Args&&... args) {
  // By value now, as CUDA takes them, whenever the kernel runs.
  using Values = std::tuple<std::remove_cv_t<Params>...>;
  auto values = std::make_shared<const Values>(std::forward<Args>(args)...);
  auto& statistics = emulator::statistics();
  ++statistics.launches;
  statistics.most_argument_bytes = std::max(statistics.most_argument_bytes, sizeof(Values));
  const std::size_t most = emulator::device().driverVersion >= 12010 ? 32764 : 4096;
  emulator::check(sizeof(Values) <= most, "the arguments of a kernel fit what the driver takes");
  emulator::check(grid.x >= 1 && block.x >= 1 && block.x <= 1024, "a launch has a valid shape");
  stream->submit([kernel, grid, block, values = std::move(values)] {
    emulator::run_grid({grid.x, 1, 1}, {block.x, 1, 1}, [&] { std::apply(kernel, *values); });
  });
}

}  // namespace fastamp::kernels::cuda
