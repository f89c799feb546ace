// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the runtime asks kernels/ for. No types of CUDA's: the emulator has its own.

#include <functional>

namespace simulated_cuda {

/// Copies the arguments, as a launch does, and returns what runs the grid.
using MakeGrid = std::function<void()> (*)(void* function, void** arguments, unsigned grid,
                                           unsigned block);

struct Kernel {
  void* function = nullptr;
  MakeGrid make = nullptr;
};

/// The type of `simulated_cuda_find_kernel`: by the name under which nvcc's stub registers it.
using FindKernel = Kernel (*)(const char* mangled);

/// Says how kernels of a type, a pointer to a function, are called.
bool add_signature(const char* type, MakeGrid make);

/// Makes the compiler emit a kernel that nothing here calls.
void keep(void* kernel);

}  // namespace simulated_cuda
