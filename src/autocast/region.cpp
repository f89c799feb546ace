#include "autocast/region.h"

#include "autocast/thread_cache.h"

#include <fastamp/autocast/registration.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

namespace fastamp {
namespace autocast {

AutocastState enter_region(const AutocastState& wanted) {
  const AutocastState saved{wanted.device, at::autocast::get_autocast_dtype(wanted.device),
                            at::autocast::is_autocast_enabled(wanted.device),
                            at::autocast::is_autocast_cache_enabled()};
  at::autocast::set_autocast_enabled(wanted.device, wanted.enabled);
  at::autocast::set_autocast_dtype(wanted.device, wanted.dtype);
  at::autocast::set_autocast_cache_enabled(wanted.cache_enabled);
  on_region_entered(at::autocast::increment_nesting());
  return saved;
}

void exit_region(const AutocastState& saved) noexcept {
  const int open_regions = at::autocast::decrement_nesting();
  on_region_left(open_regions);
  if (open_regions == 0) {
    // Ops of other libraries keep their casts in torch's cache.
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(saved.device, saved.enabled);
  at::autocast::set_autocast_dtype(saved.device, saved.dtype);
  at::autocast::set_autocast_cache_enabled(saved.cache_enabled);
}

namespace {

/// torch.autocast warns and goes on without autocast where it cannot work; so do we.
bool can_enable(c10::DeviceType device, c10::ScalarType dtype) {
  if (device == c10::kCUDA) {
    if (!at::Context::hasCUDA()) {
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
  TORCH_CHECK(
      at::autocast::is_autocast_available(device),
      "AutocastGuard: expected device to be one torch has autocast for (cpu, cuda, ...), got ",
      c10::DeviceTypeName(device, true), ".");
  const auto run_dtype = dtype.value_or(at::autocast::get_autocast_dtype(device));
  return {device, run_dtype, enabled && can_enable(device, run_dtype),
          cache_enabled.value_or(at::autocast::is_autocast_cache_enabled())};
}

}  // namespace
}  // namespace autocast

AutocastGuard::AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype,
                             bool enabled, std::optional<bool> cache_enabled)
    : saved_((install(), autocast::enter_region(
                             autocast::checked_state(device, dtype, enabled, cache_enabled)))) {}

AutocastGuard::~AutocastGuard() { autocast::exit_region(saved_); }

void clear_cast_cache() { autocast::clear_thread_cache(); }

}  // namespace fastamp
