// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

namespace simulated_cuda {

using Register = void (*)(const char* name, c10::KernelFunction kernel);

/// Registers what stands in for operators that have no kernel for the CPU of the same name.
void register_libraries(Register add);
/// The same for recurrent layers.
void register_recurrent(Register add);

}  // namespace simulated_cuda
