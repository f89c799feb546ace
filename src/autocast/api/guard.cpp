// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/thread_cache.h"
#include "autocast/policy/float8_region.h"
#include "autocast/region.h"
#include "core/thread_bound.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/registration.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

namespace fastamp {
namespace {

using autocast::AutocastState;

/// torch.autocast warns and goes on without autocast where it cannot work; so do we.
bool can_enable(c10::DeviceType device, c10::ScalarType dtype) {
  if (device == c10::kCUDA) {
    // Asked once: while the process exits torch cannot tell any more.
    static const bool has_cuda = at::Context::hasCUDA();
    if (!has_cuda) {
      TORCH_WARN(
          "AutocastGuard: expected a process with CUDA for device cuda, got none. The region is "
          "disabled.");
      return false;
    }
  } else if (dtype != c10::kBFloat16 && dtype != c10::kHalf) {
    TORCH_WARN("AutocastGuard: expected dtype to be bfloat16 or float16 on ",
               c10::DeviceTypeName(device, true), ", got ", dtype, ". The region is disabled.");
    return false;
  }
  return true;
}

AutocastState checked_state(c10::DeviceType device, std::optional<c10::ScalarType> dtype,
                            bool enabled, std::optional<bool> cache_enabled) {
  const bool is_known = device == c10::kCPU || device == c10::kCUDA;  // Saves the lookup.
  TORCH_CHECK(
      is_known || at::autocast::is_autocast_available(device),
      "AutocastGuard: expected device to be one torch has autocast for (cpu, cuda, ...), got ",
      c10::DeviceTypeName(device, true), ".");
  const auto run_dtype = dtype.has_value() ? *dtype : at::autocast::get_autocast_dtype(device);
  return {.device = device,
          .dtype = run_dtype,
          .enabled = enabled && can_enable(device, run_dtype),
          .cache_enabled = cache_enabled.has_value() ? *cache_enabled
                                                     : at::autocast::is_autocast_cache_enabled(),
          .sets_float8 = dtype.has_value(),
          .float8 = nullptr};
}

AutocastState state_with(const Float8Recipe& recipe, c10::DeviceType device, c10::ScalarType dtype,
                         bool enabled, std::optional<bool> cache_enabled) {
  const auto* const setting = autocast::float8_of_region("AutocastGuard", device, recipe, dtype);
  AutocastState state = checked_state(device, dtype, enabled, cache_enabled);
  state.float8 = setting;
  return state;
}

/// A float8 dtype on CUDA stands for a recipe. (On the CPU it is refused as torch does.)
AutocastState state_of(c10::DeviceType device, std::optional<c10::ScalarType> dtype, bool enabled,
                       std::optional<bool> cache_enabled) {
  if (device == c10::kCUDA && dtype.has_value() && c10::isFloat8Type(*dtype)) {
    autocast::check_float8_dtype("AutocastGuard", *dtype);
    return state_with(Float8Recipe(), device, c10::kBFloat16, enabled, cache_enabled);
  }
  return checked_state(device, dtype, enabled, cache_enabled);
}

}  // namespace

AutocastGuard::AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype,
                             bool enabled, std::optional<bool> cache_enabled)
    : state_((register_kernels(), state_of(device, dtype, enabled, cache_enabled))),
      id_(autocast::enter_region(state_)) {}

AutocastGuard::AutocastGuard(c10::DeviceType device, const Float8Recipe& recipe,
                             c10::ScalarType dtype, bool enabled, std::optional<bool> cache_enabled)
    : state_((register_kernels(), state_with(recipe, device, dtype, enabled, cache_enabled))),
      id_(autocast::enter_region(state_)) {}

void AutocastGuard::release() noexcept {
  const auto id = std::exchange(id_, 0);
  if (id != 0 && !autocast::exit_region(id)) {
    warn_of_other_thread("AutocastGuard");
  }
}

void clear_cast_cache() { autocast::clear_thread_cache(); }

}  // namespace fastamp
