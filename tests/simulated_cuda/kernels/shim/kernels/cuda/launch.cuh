// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for src/kernels/cuda/launch.cuh where kernels are compiled for the simulated device.
// Nothing is launched from here: fastamp's own library launches, through the stubs that nvcc has
// made. What a launch in the source says is which kernels there are and how they are called.

#include "cuda_on_cpu/emulator/grid.h"
#include "simulated_cuda/kernels/table.h"

#include <c10/cuda/CUDAException.h>

#include <cuda_runtime.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

namespace fastamp::kernels::cuda {

/// Kernels with these parameters.
template <typename... Params>
struct Signature {
  using Values = std::tuple<std::remove_cv_t<Params>...>;

  template <std::size_t... kIndex>
  static std::shared_ptr<const Values> copy(void** arguments, std::index_sequence<kIndex...>) {
    return std::make_shared<const Values>(
        *static_cast<const std::remove_cv_t<Params>*>(arguments[kIndex])...);
  }

  static std::function<void()> make(void* function, void** arguments, unsigned grid,
                                    unsigned block) {
    return [kernel = reinterpret_cast<void (*)(Params...)>(function), grid, block,
            values = copy(arguments, std::index_sequence_for<Params...>())] {
      emulator::run_grid({grid, 1, 1}, {block, 1, 1}, [&] { std::apply(kernel, *values); });
    };
  }

  static inline const bool kAdded =
      simulated_cuda::add_signature(typeid(void (*)(Params...)).name(), &Signature::make);
};

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3, dim3, cudaStream_t, Args&&...) {
  (void)Signature<Params...>::kAdded;
  simulated_cuda::keep(reinterpret_cast<void*>(kernel));
}

}  // namespace fastamp::kernels::cuda
