// SPDX-License-Identifier: Apache-2.0
#include "float8/float8_region.h"

#include "core/build_config.h"
#include "core/kernel_devices.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

namespace fastamp::autocast {
namespace {

constexpr int kFirstFloat8Capability = 89;

bool gpu_has_float8(const char* function, c10::ScalarType carrier) {
  static const bool has_cuda = at::Context::hasCUDA();
  if (!has_cuda) {
    return true;  // The region is going to be disabled, for that reason.
  }
  const int capability = compute_capability();
  if (capability == 0) {
    TORCH_WARN_ONCE(function,
                    ": expected a build of fastamp with its CUDA part for fp8 on a GPU, got one "
                    "without. The region runs in ",
                    carrier, ".");
  } else if (capability < kFirstFloat8Capability) {
    TORCH_WARN_ONCE(function, ": expected a GPU of compute capability 8.9 or later for fp8, got ",
                    capability / 10, ".", capability % 10, ". The region runs in ", carrier, ".");
  }
  return capability >= kFirstFloat8Capability;
}

const Float8Setting* checked_setting(const char* function, c10::DeviceType device,
                                     const Float8Recipe& recipe, c10::ScalarType carrier) {
  TORCH_CHECK_VALUE(device == c10::kCPU || device == c10::kCUDA, function,
                    ": expected the device of a region with a Float8Recipe to be cpu or cuda, got ",
                    c10::DeviceTypeName(device, true), ".");
  const auto* const setting = float8_setting(function, recipe, carrier);
  TORCH_CHECK(FASTAMP_HAVE_SCALED_MM, function,
              ": expected a torch with _scaled_mm for a Float8Recipe, got one without when fastamp "
              "was built.");
  return setting;
}

}  // namespace

const Float8Setting* float8_of_region(const char* function, c10::DeviceType device,
                                      const Float8Recipe& recipe, c10::ScalarType carrier) {
  const auto* const setting = checked_setting(function, device, recipe, carrier);
  if (device == c10::kCUDA) {
    return gpu_has_float8(function, carrier) ? setting : nullptr;
  }
  warn_of_slow_float8(function);
  return setting;
}

void start_default_float8(const char* function, c10::DeviceType device,
                          const Float8Recipe& recipe) {
  constexpr auto kCarrier = c10::ScalarType::BFloat16;
  const auto* const setting = checked_setting(function, device, recipe, kCarrier);
  const bool can_run = device != c10::kCUDA || gpu_has_float8(function, kCarrier);
  set_default_float8(device, can_run ? setting : nullptr);
}

void check_float8_dtype(const char* function, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == c10::kFloat8_e4m3fn, function,
                    ": expected dtype to be bfloat16, float16 or float8_e4m3fn, which stands for "
                    "bfloat16 with a default Float8Recipe, got ",
                    dtype, ". Give other formats to a Float8Recipe.");
}

}  // namespace fastamp::autocast
