// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/float8_constants.h"

#include <fastamp/export.h>

#include <c10/core/Device.h>

#include <string_view>

// Which of the GPUs that the rule has constants for a device is. Exported for tests and for the
// Python module.
namespace fastamp::autocast {

/// What the driver tells of a GPU.
struct GpuFacts {
  std::string_view driver_name;
  int capability;  ///< 90 for 9.0.
  int multiprocessors;
  double peak_bandwidth;  ///< Bytes/s; 0 if unknown.
};

/// The constants of a GPU with fp8: its own, or careful ones of what the driver tells.
FASTAMP_API Float8Gpu float8_gpu_like(const GpuFacts& facts);

/// The GPU of kFloat8Gpus with this name.
/// @throws c10::ValueError, which lists the names, if there is none.
FASTAMP_API const Float8Gpu& float8_gpu_named(const char* function, std::string_view name);

/// The GPU that the rule is asked for on a device, the same at each call; null where the rule is
/// not asked: on the CPU, on GPUs without fp8, and on CUDA devices that are not there, as those of
/// fake tensors may be.
/// After the first call, reads of two numbers.
/// @param device  "cuda" without an index is the current device.
FASTAMP_API const Float8Gpu* float8_gpu(c10::Device device);

/// For tests: from now on the rule is asked on every device, for this GPU of kFloat8Gpus; an empty
/// name ends that.
FASTAMP_API void pretend_float8_gpu(std::string_view name);

}  // namespace fastamp::autocast
